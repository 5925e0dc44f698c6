"""The fixtures' programs; run as a module, it compiles and writes them (needs libtpu)."""

import dataclasses
import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from smalti.estimate import Estimate, KernelDump, Memory, Program, compile_for, estimate
from smalti.estimate.peers import AttentionCase, attention_variants

FIXTURES = Path(__file__).parent / "fixtures"


def double(x):
    def kernel(x_ref, o_ref):
        y = x_ref[...] * 2
        o_ref[...] = jnp.exp(y)

    block = pl.BlockSpec((128, 128), lambda i: (i, 0))
    return 1 + pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 128,),
        in_specs=[block],
        out_specs=block,
    )(x)


def program(name: str) -> Program:
    """A fixture."""
    value = json.loads(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))
    kernels = {op: KernelDump(**dump) for op, dump in value.pop("kernels").items()}
    memory, flags = Memory(**value.pop("memory")), tuple(value.pop("flags"))
    return Program(**value, kernels=kernels, memory=memory, flags=flags)


def estimated(name: str) -> Estimate:
    return estimate(program(name))


def _compile() -> dict[str, Program]:
    case = AttentionCase.parse("B=1,Hq=1,Hkv=1,S=256,D=128")
    programs = {"double": compile_for(double, jax.ShapeDtypeStruct((512, 128), jnp.float32))}
    for peer in ("jax_flash", "xla"):
        variant = attention_variants(peer, case, "forward")[-1]
        programs[peer] = compile_for(variant.fn, *variant.args)
    return programs


def _write(name: str, compiled: Program) -> None:
    text = json.dumps(dataclasses.asdict(compiled))
    text = re.sub(r'(\\+")/[^"\\]*/(?=[\w.-]+\.py\\+")', r"\1", text)
    (FIXTURES / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    for name, compiled in _compile().items():
        _write(name, compiled)
