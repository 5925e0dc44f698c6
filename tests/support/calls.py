"""Calls of the public `smalti.attention`, and their comparison with the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti import BlockSizes
from smalti.masks import BlockMask
from tests.support.budgets import judge
from tests.support.inputs import Inputs

# Every implementation obeys the whole contract; to test another one, add its name.
IMPLEMENTATIONS = ["reference", "blockwise", "pallas"]
# Several tiles, where an implementation would take one for sequences as short as these.
TILES = {"pallas": BlockSizes(128, 128)}


def compiler_options(implementation) -> dict | None:
    """For `jax.jit`: an interpreted kernel takes long to compile, and runs but once."""
    return {"xla_backend_optimization_level": 0} if implementation == "pallas" else None


class Refused(Exception):
    """An implementation refused what it cannot do, and its message names it."""


def call(q, k, v, *, score_mod=None, captured=(), **arguments):
    """`smalti.attention`, with a ``score_mod`` that takes its arrays as further arguments."""
    if score_mod is not None:
        arguments["score_mod"] = lambda *scalars: score_mod(*scalars, *captured)
    if arguments.get("implementation") != "pallas":
        return smalti.attention(q, k, v, **arguments)
    arguments = {"interpret": True, **arguments}
    if arguments.get("block_sizes") is None:
        own = isinstance(arguments.get("mask"), BlockMask)
        arguments["block_sizes"] = None if own else TILES["pallas"]
    if features := refused_by_pallas(q, **arguments):
        message = f"implementation='pallas': .*({'|'.join(features)})"
        with pytest.raises(NotImplementedError, match=message):
            smalti.attention(q, k, v, **arguments)
        raise Refused(features)

    def attend(q, k, v):
        return smalti.attention(q, k, v, **arguments)

    leaves = jax.tree.leaves((q, k, v, arguments))
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        attend = jax.jit(attend, compiler_options=compiler_options("pallas"))
    return attend(q, k, v)


def refused_by_pallas(q, **arguments) -> list[str]:
    """What of a call the kernels cannot do, each as the message names it."""
    return ["float16"] if q.dtype == jnp.float16 else []


def program(*, bias=None, sinks=None, captured=(), **arguments):
    """A function of `Inputs` that gives result, lse and all gradients, with cotangents for both, by
    name. What it compiles, it compiles once."""
    captured = tuple(jnp.asarray(x) for x in captured)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in captured]

    def forward(q, k, v, bias, sinks, captured):
        return call(
            q, k, v, bias=bias, sinks=sinks, captured=captured, return_lse=True, **arguments
        )

    def both(primals, cotangents):
        results, pull = jax.vjp(forward, *primals)
        return results, pull(cotangents)

    options = compiler_options(arguments.get("implementation"))
    compiled = jax.jit(both, compiler_options=options)

    def tensors(inputs: Inputs) -> dict:
        primals = (inputs.q, inputs.k, inputs.v, bias, sinks, captured)
        (out, lse), grads = compiled(primals, (inputs.dout, inputs.dlse))
        dq, dk, dv, dbias, dsinks, dcaptured = grads
        found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        found |= {"dbias": dbias} if bias is not None else {}
        found |= {"dsinks": dsinks} if sinks is not None else {}
        for name, x in found.items():
            like = {"lse": inputs.dlse, "dbias": bias, "dsinks": sinks}.get(name, inputs.q)
            assert x.dtype == like.dtype, f"{name}: {x.dtype}, not {like.dtype}"
        found |= {f"captured{i}": x for i, x in enumerate(dcaptured) if floats[i]}
        return {name: np.asarray(x) for name, x in found.items()}

    return tensors


def run(inputs: Inputs, **arguments) -> dict:
    return program(**arguments)(inputs)


def check(
    implementation: str, inputs: Inputs, *, block_sizes=None, interpret=None, **arguments
) -> dict:
    """All tensors of a call against the oracle, within their budgets; returns them."""
    how = {"block_sizes": block_sizes} | ({} if interpret is None else {"interpret": interpret})
    got = run(inputs, implementation=implementation, **how, **arguments)
    judge(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **arguments).check(got)
    return got
