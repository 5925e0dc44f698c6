"""Compile a step of decoding for TPUs that are not there; a program, run by `test_compile`.

    python -m tests.decode.compile_for_tpu v6e 'long window' float32

prints one JSON object a line, ``{"variant": …, "hlo": …}`` or ``{"variant": …, "error": …}``, each
as soon as it is known: a variant may abort the process.
"""

import dataclasses
import json
import os
import sys
from typing import Any

# Before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from smalti.chips import TENSOR_CORES
from smalti.decode import RingBuffer, attend


@dataclasses.dataclass(frozen=True)
class Variant:
    B: int = 8
    T: int = 1
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int | None = None
    sinks: int = 4
    window: int = 4096
    dtype: str = "bfloat16"
    positions: str | None = None
    lengths: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    devices: int = 1  # under shard_map, each with some of the batch
    x64: bool = False
    vmapped: bool = False  # two caches, one after the other


VARIANTS = {
    "long window": Variant(),
    "cache positions": Variant(positions="cache"),
    "eight tokens": Variant(T=8, positions="cache", lengths=True),
    "float32": Variant(Hkv=32, B=4, window=1020, dtype="float32", positions="cache"),
    "ragged": Variant(B=3, T=3, Hq=6, Hkv=2, D=80, Dv=48, sinks=5, window=1001),
    "tiny": Variant(B=1, Hq=1, Hkv=1, D=2, Dv=1, sinks=0, window=1),
    "four devices": Variant(devices=4, positions="cache", lengths=True),
    "plain": Variant(sinks=0, window=8192, positions="absolute", D=64),
    "many heads": Variant(Hq=64, Hkv=64, window=256, sinks=0),
    "one key head": Variant(Hq=71, Hkv=1, D=64, T=8, window=2048),
    "float32, D256": Variant(Hq=16, D=256, window=4096, dtype="float32", T=5, positions="cache"),
    "softcap": Variant(options=(("softcap", 30.0), ("scale", 0.1), ("layout", "BHSD")), D=256),
    "five tokens": Variant(T=5, Hq=40, window=2000, positions="cache"),
    "64 bits": Variant(window=2000, positions="cache", lengths=True, x64=True),
    "wide heads": Variant(
        B=2, Hq=64, Hkv=64, D=512, T=8, window=2000, dtype="float32", positions="cache"
    ),
    "many sequences": Variant(B=128, Hq=64, D=64, window=2000),
    "vmapped": Variant(window=600, positions="cache", lengths=True, vmapped=True),
}
# Compiled for every chip; the others for v6e alone.
CORE = ("long window", "eight tokens", "float32", "ragged", "tiny", "four devices")
COMPILED = {chip: tuple(VARIANTS) if chip == "v6e" else CORE for chip in TENSOR_CORES}


def program(variant: Variant, implementation: str | None = None):
    """A step of decoding, and the shapes of its arguments."""
    v = variant
    options = dict(v.options)
    Dv = v.Dv or v.D

    def step(cache, q, k, new_v, *lengths):
        return attend(
            q, cache, k, new_v, lengths=lengths[0] if lengths else None, positions=v.positions,
            implementation=implementation, **options,
        )  # fmt: skip

    cache = jax.eval_shape(
        lambda: RingBuffer.empty(v.B, v.Hkv, v.D, Dv, sinks=v.sinks, window=v.window, dtype=v.dtype)
    )
    bhsd = options.get("layout") == "BHSD"

    def new(heads: int, dim: int):
        sizes = (heads, v.T) if bhsd else (v.T, heads)
        return jax.ShapeDtypeStruct((v.B, *sizes, dim), v.dtype)

    arrays = (new(v.Hq, v.D), new(v.Hkv, v.D), new(v.Hkv, Dv))
    if v.lengths:
        arrays += (jax.ShapeDtypeStruct((v.B,), jnp.int32),)
    if v.vmapped:
        step = jax.vmap(step)
        arrays, cache = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), (arrays, cache)
        )
    return step, (cache, *arrays)


def compile_variant(topology, variant: Variant, implementation: str | None = None) -> str:
    devices = np.array(topology.devices[: variant.devices])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    step, shapes = program(variant, implementation)
    if variant.devices > 1:
        step = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    where = NamedSharding(mesh, P("data"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    with jax.set_mesh(mesh), jax.enable_x64(variant.x64):
        return jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()


def main(chip: str, *names: str) -> None:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TENSOR_CORES[chip].topology
    )
    for name in names or COMPILED[chip]:
        try:
            result = {"hlo": compile_variant(topology, VARIANTS[name])}
        except Exception as error:  # whatever it is, it is that variant's result
            result = {"error": f"{type(error).__name__}: {error}"[:3000]}
        print(json.dumps({"variant": name, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
