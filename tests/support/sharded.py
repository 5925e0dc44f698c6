"""Attention under `shard_map` with its default checks, against the same call on one device.

``python -m tests.support.sharded`` with eight (simulated) devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from smalti import masks
from tests.support.calls import IMPLEMENTATIONS, call
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

            def local(a, implementation=implementation, arguments=arguments):
                return call(
                    *(a[x] for x in "qkv"),
                    bias=a["bias"],
                    sinks=a["sinks"],
                    score_mod=per_head,
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
            both = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
                both(floats, sharded),
                both(floats, local),
            )
            print(implementation, name, "agrees")


if __name__ == "__main__":
    main()
