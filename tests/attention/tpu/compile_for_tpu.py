"""Compile the kernels for TPUs that are not there; a program, run by `test_compile`.

    python -m tests.attention.tpu.compile_for_tpu v6e D64 'softcap, sinks'

compiles these variants, or without names those of COMPILED for the chip. It prints one JSON object
a line, ``{"variant": …, "kernels": {name: {"vmem": bytes, "estimate": bytes}}}`` or
``{"variant": …, "error": …}``, each as soon as it is known: a variant may abort the process. `vmem`
is what the compiler says that the kernel uses.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable
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

import smalti
from smalti import masks
from smalti.attention.tpu.block_sizes import operand_blocks
from smalti.attention.tpu.grid import Grid
from smalti.attention.tpu.pipeline import written_out
from smalti.attention.tpu.vmem import vmem_bytes
from smalti.backend import target_chip
from smalti.chips import TENSOR_CORES
from smalti.estimate.module.hlo import read_module, scoped_vmem_bytes
from smalti.estimate.module.shapes import VMEM

SMALL = smalti.BlockSizes(128, 256)
# So many that XLA cannot keep the arrays themselves in VMEM, where kernels then need less.
B, H = 16, 128
DOCUMENTS = np.repeat(np.arange(4, dtype=np.int32), 128)[None].repeat(B, 0)  # [B, 512]


@dataclasses.dataclass(frozen=True)
class Variant:
    B: int = B
    Hq: int = H
    Hkv: int = H
    S: int = 512
    Sk: int | None = None
    D: int = 128
    Dv: int | None = None
    dtype: str = "bfloat16"
    layout: str = "BHSD"
    mask: Callable[..., Any] = masks.causal  # of the arrays that `traced` describes
    traced: tuple[tuple[int, ...], ...] = ()  # shapes of int32
    bias: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None
    score_mod: Callable[..., Any] | None = None  # after its arguments, of the array `captured`
    captured: tuple[int, ...] = ()  # its shape, float32
    blocks: smalti.BlockSizes | None = SMALL
    precision: str | None = None  # by jax.default_matmul_precision
    vmapped: bool = False  # two of all, one after the other
    x64: bool = False  # with jax.enable_x64


def document(ids):
    return masks.document(ids) & masks.causal()


# Compiled for every chip.
CORE = {
    "D64": Variant(D=64),
    "D128": Variant(),
    "float32": Variant(dtype="float32"),
    "traced documents": Variant(mask=document, traced=((B, 512),)),
    "tiny": Variant(B=2, Hq=2, Hkv=2, S=1, D=16, blocks=None),
}  # fmt: skip
# As much of VMEM as a call can ask for, which compiles for long.
EXTREME = {
    "extreme": Variant(
        B=16, S=8192, D=256, dtype="float32", bias=(1, 2, 8192, 8192), Hq=2, Hkv=2, mask=document,
        traced=((16, 8192),), blocks=None,
    ),
}  # fmt: skip
# With the blocks that a user gets who gives none, and oblong ones: each compiles for long.
CHOSEN = {
    "chosen blocks": Variant(S=2048, blocks=None),
    "chosen blocks, D128": Variant(B=2, Hq=64, Hkv=64, S=4096, blocks=None),
    "chosen blocks, D256": Variant(B=2, Hq=64, Hkv=64, S=8192, D=256, blocks=None),
    "chosen blocks, window": Variant(
        B=2, Hq=64, Hkv=64, S=4096, blocks=None, mask=lambda: masks.sliding_window(1024)
    ),
    "chosen blocks, streaming": Variant(
        B=2, Hq=64, Hkv=64, S=4096, blocks=None, mask=lambda: masks.streaming(sinks=4, window=512)
    ),
    "chosen blocks, documents": Variant(
        B=2, Hq=64, Hkv=64, S=4096, blocks=None, mask=document, traced=((2, 4096),)
    ),
    "chosen blocks, ALiBi": Variant(
        B=2,
        Hq=64,
        Hkv=64,
        S=4096,
        blocks=None,
        captured=(64,),
        score_mod=lambda s, b, h, q, k, x: s - x[h] * (q - k),
    ),
    "chosen blocks, relative": Variant(
        B=2,
        Hq=64,
        Hkv=64,
        S=4096,
        blocks=None,
        captured=(64, 8191),
        score_mod=lambda s, b, h, q, k, x: s + x[h, q - k + 4095],
    ),
    "few queries a tile": Variant(S=2304, blocks=smalti.BlockSizes(128, 1024)),
    "few keys a tile": Variant(
        B=2, Hq=64, Hkv=64, S=2304, D=256, blocks=smalti.BlockSizes(512, 128)
    ),
    "chosen blocks, float32": Variant(B=2, Hq=64, Hkv=64, S=4096, dtype="float32", blocks=None),
}
MORE = {
    "long": Variant(Hq=8, Hkv=8, S=8192, blocks=smalti.BlockSizes(256, 512)),
    **{f"D{D}": Variant(D=D) for D in (80, 96, 256)},
    "D192, Dv128": Variant(D=192, Dv=128),
    "D7, Dv5": Variant(B=2, Hq=2, Hkv=2, D=7, Dv=5, S=300),
    "D72 float32": Variant(D=72, dtype="float32"),
    "D256 float32": Variant(D=256, dtype="float32"),
    "full": Variant(mask=masks.full),
    "window": Variant(mask=lambda: masks.sliding_window(200)),
    "local": Variant(mask=lambda: masks.local(100, 30)),
    "prefix": Variant(mask=lambda: masks.prefix_lm(jnp.arange(B) % 300)),
    "streaming": Variant(mask=lambda: masks.streaming(sinks=4, window=200)),
    "documents": Variant(mask=lambda: document(DOCUMENTS)),
    "traced lengths": Variant(
        mask=lambda n: masks.lengths(q=n, kv=n) & masks.causal(offset=n), traced=((B,),)
    ),
    "inverted": Variant(mask=lambda ids: ~masks.document(ids) | masks.causal(), traced=((B, 512),)),
    **{
        f"bias {shape}": Variant(bias=shape)
        for shape in (
            (B, H, 512, 512),
            (1, H, 512, 512),
            (B, 1, 512, 512),
            (B, H, 1, 512),
            (B, 1, 1, 512),
            (B, H, 512, 1),
            (1, 1, 512, 1),
            (1, H, 1, 1),
        )
    },
    "mask_mod": Variant(mask=lambda: lambda b, h, q, k: (q + 2 * k + h) % 3 != b),
    "array mask": Variant(mask=lambda: np.random.default_rng(0).random((B, 1, 512, 512)) < 0.5),
    "array mask of keys": Variant(
        mask=lambda keys: lambda b, h, q, k: keys[b, k] > 0, traced=((B, 512),)
    ),
    "BlockMask": Variant(
        mask=lambda: masks.build_block_mask(
            masks.prefix_lm(100) & masks.local(300, 512, 0), B, H, 512, 512, 128, 256
        )
    ),
    "score_mod, heads": Variant(
        score_mod=lambda s, b, h, q, k, x: s - x[h] * (q - k), captured=(H,)
    ),
    "score_mod, queries": Variant(
        score_mod=lambda s, b, h, q, k, x: s + x[b, q], captured=(B, 512)
    ),
    "score_mod, keys": Variant(
        score_mod=lambda s, b, h, q, k, x: s * x[h, k], captured=(H, 512), softcap=30.0
    ),
    "score_mod, relative": Variant(
        score_mod=lambda s, b, h, q, k, x: s + x[h, q - k + 511], captured=(H, 1023)
    ),
    "score_mod, float32": Variant(
        dtype="float32", score_mod=lambda s, b, h, q, k, x: s + x[q - k + 511], captured=(1023,)
    ),
    "softcap, sinks": Variant(softcap=30.0, sinks=True),
    "GQA": Variant(Hkv=H // 4, mask=document, traced=((B, 512),)),
    "MQA, BSHD": Variant(Hkv=1, layout="BSHD"),
    "BSHD, D64": Variant(D=64, layout="BSHD"),
    "ragged": Variant(S=333, D=96),
    "ragged, BSHD": Variant(S=333, layout="BSHD", mask=document, traced=((B, 333),)),
    "cross": Variant(S=5, Sk=700),
    # Mosaic knows neither these of bfloat16 nor three-pass products of float32.
    "highest": Variant(mask=document, traced=((B, 512),), precision="highest"),
    "float32, high": Variant(dtype="float32", precision="tensorfloat32"),
    "vmapped": Variant(
        mask=lambda n, m: masks.lengths(kv=n) & masks.causal(offset=m),
        traced=((B,), ()),
        sinks=True,
        bias=(1, H, 1, 512),
        vmapped=True,
    ),
    "64 bits": Variant(mask=document, traced=((B, 512),), x64=True),
    "many major blocks, window": Variant(
        B=8,
        Hq=4,
        Hkv=2,
        S=32768,
        mask=lambda: masks.streaming(sinks=4, window=512),
        blocks=None,
    ),
    "many major blocks": Variant(
        B=8,
        Hq=4,
        Hkv=4,
        S=32768,
        D=256,
        mask=document,
        traced=((8, 32768),),
        blocks=smalti.BlockSizes(256, 512),
    ),
}


# By chip. All for v6e, for which most measurements are; each of CHOSEN for one more, of which those
# that fill VMEM for v7x, which has half.
COMPILED = {
    "v4": (*CORE, *EXTREME),
    "v5e": (*CORE, "chosen blocks", "chosen blocks, window", "few queries a tile"),
    "v5p": (*CORE, "chosen blocks, D128"),
    "v6e": (*CORE, *EXTREME, *CHOSEN, *MORE),
    "v7x": (*CORE, *EXTREME, "chosen blocks, D256", "few keys a tile", "chosen blocks, float32"),
}


def functions(variant: Variant):
    """The gradient of a loss that uses all results, and the shapes of its arguments."""
    v = variant
    Sk, Dv = v.Sk or v.S, v.Dv or v.D

    def shape(heads: int, length: int, dim: int):
        sizes = (v.B, heads, length, dim) if v.layout == "BHSD" else (v.B, length, heads, dim)
        return jax.ShapeDtypeStruct(sizes, v.dtype)

    arrays = {"q": shape(v.Hq, v.S, v.D), "k": shape(v.Hkv, Sk, v.D), "v": shape(v.Hkv, Sk, Dv)}
    if v.bias is not None:
        arrays["bias"] = jax.ShapeDtypeStruct(v.bias, "float32")
    if v.score_mod is not None:
        arrays["captured"] = jax.ShapeDtypeStruct(v.captured, "float32")
    if v.sinks:
        arrays["sinks"] = jax.ShapeDtypeStruct((v.Hq,), "float32")

    def loss(arrays, *traced):
        arrays, mods = dict(arrays), {}
        if v.score_mod is not None:
            captured = arrays.pop("captured")
            mods["score_mod"] = lambda *scalars: v.score_mod(*scalars, captured)
        out, lse = smalti.attention(
            **arrays, **mods, mask=v.mask(*traced), softcap=v.softcap, layout=v.layout,
            return_lse=True, implementation="pallas", block_sizes=v.blocks,
        )  # fmt: skip
        return out.astype(jnp.float32).sum() + lse.sum()

    shapes = arrays, *(jax.ShapeDtypeStruct(shape, "int32") for shape in v.traced)
    if not v.vmapped:
        return jax.value_and_grad(loss), shapes
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), shapes)
    return jax.vmap(jax.value_and_grad(loss)), shapes


@contextlib.contextmanager
def estimates():
    """What `vmem_bytes` says of every kernel that is traced, by its name."""
    found, call = {}, Grid.call

    def recorded(grid, kernel, inputs, outputs, *args, rules, name, **options):
        arrays = {x.name: x.array for x in inputs}
        bias, walk = arrays.get("bias"), grid.walk
        written, loops = written_out(walk)
        score = rules.score_mod
        kinds = [x.kind for mod in (rules.mask, score) for x in mod.operands]
        found[name] = vmem_bytes(
            name.removeprefix("smalti_attention_"),
            grid.walk.blocks,
            grid.heads,
            arrays["q"].dtype.itemsize,
            chip=target_chip(),
            operands=operand_blocks(kinds, walk.blocks, walk.q_len, walk.kv_len),
            score_mod=len(score.floating) if score.is_given else None,
            relative="relative" in kinds,
            one_tile_per_query=walk.one_tile_per_query,
            first_keys=walk.first_keys,
            bias=None if bias is None else (bias.shape[2:], bias.dtype.itemsize),
            written_out=written,
            loops=loops,
        )
        return call(grid, kernel, inputs, outputs, *args, rules=rules, name=name, **options)

    Grid.call = recorded
    try:
        yield found
    finally:
        Grid.call = call


def used_vmem(hlo: str) -> dict[str, dict[str, int]]:
    """By kernel, what the compiler took, and how many of its operands and results are in VMEM as a
    whole."""
    module, used = read_module(hlo), {}
    taken = scoped_vmem_bytes(module)
    for computation in module.computations.values():
        for call in computation.instructions:
            if call.target == "tpu_custom_call":
                (name,) = re.findall(r"(smalti_attention_\w+?)/pallas_call", call.op_name)
                inputs = [computation.by_name[operand].shape for operand in call.operands]
                arrays = [*call.shape.leaves, *inputs[1:]]  # without the list of tiles
                # Rows of float32 or ids are small.
                whole = sum(x.space == VMEM and x.dims[-2:-1] != (1,) for x in arrays)
                used[name] = {"vmem": taken[call.name], "whole": whole}
    return used


def compile_variant(mesh: Mesh, variant: Variant) -> dict[str, dict[str, int]]:
    fn, shapes = functions(variant)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), shapes
    )
    precision = jax.default_matmul_precision(variant.precision)
    with jax.set_mesh(mesh), precision, jax.enable_x64(variant.x64), estimates() as found:
        used = used_vmem(jax.jit(fn).lower(*shapes).compile().as_text())
    return {name: {**used[name], "estimate": found[name]} for name in found}


def main(chip: str, *names: str) -> None:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TENSOR_CORES[chip].topology
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    variants = CORE | EXTREME | CHOSEN | MORE
    for name in names or COMPILED[chip]:
        start = time.process_time()
        try:
            result = {"kernels": compile_variant(mesh, variants[name])}
        except Exception as error:  # whatever it is, it is that variant's result
            result = {"error": f"{type(error).__name__}: {error}"[:3000]}
        print(
            json.dumps({"variant": name, **result, "cpu_s": round(time.process_time() - start, 1)}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
