"""Calls of the public `smalti.attention`, and their comparison with the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import smalti
from tests.support.budgets import judge
from tests.support.inputs import Inputs

# Every implementation obeys the whole contract; to test another one, add its name.
IMPLEMENTATIONS = ["reference", "blockwise"]


def call(q, k, v, *, score_mod=None, captured=(), **arguments):
    """`smalti.attention`, with a ``score_mod`` that takes its arrays as further arguments."""
    if score_mod is not None:
        arguments["score_mod"] = lambda *scalars: score_mod(*scalars, *captured)
    return smalti.attention(q, k, v, **arguments)


def program(*, bias=None, sinks=None, captured=(), **arguments):
    """A function of `Inputs` that gives result, lse and all gradients, with cotangents for both, by
    name. What it compiles, it compiles once."""
    captured = tuple(jnp.asarray(x) for x in captured)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in captured]

    def forward(q, k, v, bias, sinks, captured):
        return call(
            q, k, v, bias=bias, sinks=sinks, captured=captured, return_lse=True, **arguments
        )

    @jax.jit
    def compiled(primals, cotangents):
        results, pull = jax.vjp(forward, *primals)
        return results, pull(cotangents)

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


def check(implementation: str, inputs: Inputs, *, block_sizes=None, **arguments) -> dict:
    """All tensors of a call against the oracle, within their budgets; returns them."""
    got = run(inputs, implementation=implementation, block_sizes=block_sizes, **arguments)
    judge(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **arguments).check(got)
    return got
