"""Attention under `shard_map` with its default checks, against the same call on one device.

``python -m tests.support.sharded`` with eight (simulated) devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from smalti import BlockSizes, masks
from tests.support.calls import IMPLEMENTATIONS, call, compiler_options
from tests.support.cases import per_head
from tests.support.inputs import Sizes, draw, normal

SIZES = Sizes(B=4, Sq=33, Sk=40, Hq=4, Hkv=2, D=8, Dv=8)


def main():
    assert jax.device_count() == 8, jax.device_count()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    inputs = draw(SIZES)
    by_head = P("data", None, "model")
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (4, 40)), 1).astype(np.int32)
    parts = {
        "q": (inputs.q, by_head),
        "k": (inputs.k, by_head),
        "v": (inputs.v, by_head),
        "bias": (normal(1, 4, 33, 40, seed="bias"), P(None, "model")),
        "sinks": (normal(4, seed="sinks"), P("model")),
        "weight": (normal(4, seed="weight"), P("model")),
        "ids": (ids, P("data")),
        "length": (np.array([40, 0, 17, 33], np.int32), P("data")),
        "offset": (np.int32(5), P()),
    }
    arrays = {name: jnp.asarray(x) for name, (x, _) in parts.items()}
    specs = {name: spec for name, (_, spec) in parts.items()}
    masked = {
        "causal": lambda a: {"mask": masks.causal()},
        "traced": lambda a: {
            "mask": masks.streaming(sinks=2, window=9, offset=a["offset"])
            & masks.lengths(kv=a["length"]),
            "segment_ids": (a["ids"][:, 7:], a["ids"]),
        },
    }
    for implementation in IMPLEMENTATIONS:
        for name, arguments in masked.items():
            if implementation == "pallas" and name != "traced":
                continue  # its kernels for known bands are below

            def local(a, implementation=implementation, arguments=arguments):
                return call(
                    *(a[x] for x in "qkv"),
                    bias=a["bias"],
                    sinks=a["sinks"],
                    **({} if implementation == "pallas" else {"score_mod": per_head}),
                    captured=(a["weight"],),
                    implementation=implementation,
                    return_lse=True,
                    **arguments(a),
                )

            sharded = jax.shard_map(
                local, mesh=mesh, in_specs=(specs,), out_specs=(by_head, P("data", "model"))
            )

            def loss(floats, function):
                out, lse = function({**arrays, **floats})
                return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

            floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
            both = jax.jit(
                jax.value_and_grad(loss, has_aux=True),
                static_argnums=1,
                compiler_options=compiler_options(implementation),
            )
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
                both(floats, sharded),
                both(floats, local),
            )
            print(implementation, name, "agrees")
    check_without_bias(mesh)


def check_without_bias(mesh):
    """Calls whose walk has whole and cut chunks, and mods whose arrays are the same everywhere."""
    q, k, v = (normal(4, 40, 4, 8, seed=name) for name in "qkv")
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (4, 40)), 1), jnp.int32)
    table = jnp.linspace(0.0, 1.0, 40)
    by_head = P("data", None, "model")
    calls = {
        "causal": lambda ids, table: {"mask": masks.causal()},
        "segments": lambda ids, table: {"segment_ids": ids},
        "lengths": lambda ids, table: {"mask": masks.lengths(kv=ids.max() + 20)},
        "array": lambda ids, table: {"mask": table[None, :] <= table[:, None]},
        "score_mod": lambda ids, table: {
            "score_mod": lambda s, b, h, q_idx, kv_idx: s - 0.1 * (q_idx - kv_idx)
        },
        "captured": lambda ids, table: {
            "mask": lambda b, h, q_idx, kv_idx: table[kv_idx] <= table[q_idx],
            "score_mod": lambda s, b, h, q_idx, kv_idx: s + table[kv_idx],
        },
    }
    for implementation in IMPLEMENTATIONS:
        sizes = {"block_sizes": BlockSizes(8, 8)} if implementation == "blockwise" else {}
        for name, arguments in calls.items():

            def local(
                q, k, v, ids, table, arguments=arguments, implementation=implementation, sizes=sizes
            ):
                return call(
                    q, k, v, implementation=implementation, **sizes, **arguments(ids, table)
                )

            sharded = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(by_head,) * 3 + (P("data"), P()),
                out_specs=by_head,
            )

            if implementation == "pallas" and name not in ("causal", "segments"):
                continue

            options = compiler_options(implementation)

            def gradients(function, ids=ids, options=options):
                def loss(q, k, v, table):
                    return jnp.sum(jnp.sin(function(q, k, v, ids, table)))

                return jax.jit(jax.grad(loss, (0, 1, 2, 3)), compiler_options=options)(
                    q, k, v, table
                )

            for a, b in zip(gradients(sharded), gradients(local), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
            print(implementation, name, "without bias agrees")


if __name__ == "__main__":
    main()
