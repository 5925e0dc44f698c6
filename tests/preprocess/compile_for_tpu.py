"""Compile the step for TPUs that are not there; a program, run by `test_compile`.

    python -m tests.preprocess.compile_for_tpu v5e D256 partial

prints one JSON object a line, ``{"case": …, "hlo_forward": …, "hlo_backward": …}`` or
``{"case": …, "error": …}``, each as soon as it is known: a case may abort the process.
"""

import json
import os
import sys

# Before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from smalti.chips import TENSOR_CORES
from smalti.preprocess import qk_norm_rope

# name: (devices, B, S, Hq, Hkv, D, Dv, dtype), and options
CASES = {
    **{
        f"D{D}-{dtype}": (1, 2, 1024, 8, 2, D, D, dtype)
        for D in (128, 64)
        for dtype in ("bfloat16", "float32")
    },
    "many-heads": (1, 1, 2048, 64, 8, 128, 128, "float32"),
    # What their tiles take up comes nearest to the budget.
    "fullest-forward": (1, 1, 1024, 16, 2, 128, 128, "bfloat16"),
    "fullest-backward": (1, 1, 1024, 8, 8, 64, 64, "bfloat16"),
    "ragged": (1, 2, 1001, 6, 3, 80, 48, "bfloat16"),
    "odd-sizes": (1, 3, 37, 5, 1, 96, 7, "float32"),
    "D32-bfloat16": (1, 1, 300, 4, 4, 32, 32, "bfloat16"),
    "smallest": (1, 1, 1, 1, 1, 2, 1, "bfloat16"),
    "D256": (1, 1, 600, 2, 1, 256, 256, "bfloat16"),
    "interleaved": (1, 2, 256, 8, 2, 128, 128, "bfloat16"),
    "interleaved-D64-float32": (1, 2, 700, 3, 3, 64, 64, "float32"),
    "partial": (1, 2, 256, 8, 2, 64, 64, "bfloat16"),
    "partial-D80": (1, 1, 300, 4, 4, 80, 80, "bfloat16"),
    "by-token": (1, 4, 256, 8, 2, 128, 128, "bfloat16"),
    "rotation-alone": (1, 2, 256, 8, 2, 64, 64, "bfloat16"),
    "64-bits": (1, 1, 256, 2, 2, 64, 64, "bfloat16"),
    "four-devices": (4, 8, 512, 8, 2, 128, 128, "bfloat16"),
    "four-devices-offsets": (4, 8, 512, 8, 2, 64, 64, "bfloat16"),
}
OPTIONS = {
    "interleaved": {"rope_interleaved": True},
    "interleaved-D64-float32": {"rope_interleaved": True},
    "partial": {"rotary_dim": 16},
    "partial-D80": {"rotary_dim": 20, "rope_interleaved": True},
    "rotation-alone": {"norm_eps": None},
}
# Of these cases each sequence has positions, or an offset, of its own.
BY_BATCH = {"by-token": ("positions",), "four-devices-offsets": ("position_offset",)}
# Compiled for every chip; the others for v6e alone.
CORE = (
    *("D128-bfloat16", "D128-float32", "fullest-forward", "fullest-backward", "ragged"),
    *("interleaved", "partial-D80", "four-devices-offsets"),
)
X64 = ("64-bits",)  # compiled with jax.enable_x64
MODEL_WIDTH = 512


def compile_case(topology, name) -> dict[str, str]:
    devices, B, S, Hq, Hkv, D, Dv, dtype = CASES[name]
    options, own = OPTIONS.get(name, {}), BY_BATCH.get(name, ())
    mesh = Mesh(np.array(topology.devices[:devices]), ("data",), axis_types=(AxisType.Auto,))
    by_batch, shared = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def step(q, k, v, q_scale, k_scale, positions, position_offset):
        where = {"positions": positions, "position_offset": position_offset}
        return qk_norm_rope(q, k, v, q_scale=q_scale, k_scale=k_scale, **where, **options)

    where = [P("data") if x in own else P() for x in ("positions", "position_offset")]
    prepare = jax.shard_map(
        step, mesh=mesh, in_specs=(*(P("data"),) * 3, P(), P(), *where), out_specs=P("data")
    )

    def forward(x, wq, wk, wv, *rest):
        """From the projections, as in a model: no copy may come between them and the kernel."""
        q, k, v = ((x @ w).reshape(B, S, H, -1) for w, H in ((wq, Hq), (wk, Hkv), (wv, Hkv)))
        return prepare(q, k, v, *rest)

    def backward(q, k, v, q_scale, k_scale, positions, offset, *cotangents):
        _, vjp = jax.vjp(lambda *xs: prepare(*xs, positions, offset), q, k, v, q_scale, k_scale)
        return vjp(cotangents)

    def aval(*shape, dtype=dtype, sharding=by_batch):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x = aval(B, S, MODEL_WIDTH)
    weights = [aval(MODEL_WIDTH, n, sharding=shared) for n in (Hq * D, Hkv * D, Hkv * Dv)]
    rest = [aval(D, dtype="float32", sharding=shared)] * 2
    for argument, shape in (("positions", (S,)), ("position_offset", ())):
        if argument in own:
            rest.append(aval(B, *shape, dtype="int32"))
        else:
            rest.append(aval(*shape, dtype="int32", sharding=shared))
    qkv = [aval(B, S, Hq, D), aval(B, S, Hkv, D), aval(B, S, Hkv, Dv)]
    cotangents = [aval(B, Hq, S, D), aval(B, Hkv, S, D), aval(B, Hkv, S, Dv)]
    with jax.set_mesh(mesh), jax.enable_x64(name in X64):
        return {
            "hlo_forward": jax.jit(forward).lower(x, *weights, *rest).compile().as_text(),
            "hlo_backward": jax.jit(backward).lower(*qkv, *rest, *cotangents).compile().as_text(),
        }


def main(chip: str, *cases: str) -> None:
    name = TENSOR_CORES[chip].topology
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    for name in cases:
        try:
            result = compile_case(topology, name)
        except Exception as error:  # whatever it is, it is that case's result
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
