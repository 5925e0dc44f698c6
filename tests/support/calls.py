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


def run(inputs: Inputs, *, bias=None, sinks=None, captured=(), **arguments) -> dict:
    """Result, lse and all gradients, with cotangents for both, by name."""

    def forward(q, k, v, bias, sinks, captured):
        return call(
            q, k, v, bias=bias, sinks=sinks, captured=captured, return_lse=True, **arguments
        )

    @jax.jit
    def program(inputs, cotangents):
        results, pull = jax.vjp(forward, *inputs)
        return results, pull(cotangents)

    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in captured]
    differentiable = tuple(jnp.asarray(x) for x in captured)
    primals = (inputs.q, inputs.k, inputs.v, bias, sinks, differentiable)
    (out, lse), grads = program(primals, (inputs.dout, inputs.dlse))
    dq, dk, dv, dbias, dsinks, dcaptured = grads
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if bias is not None:
        found["dbias"] = dbias
    if sinks is not None:
        found["dsinks"] = dsinks
    found |= {f"captured{i}": x for i, x in enumerate(dcaptured) if floats[i]}
    for name, x in found.items():
        expected = {"lse": jnp.float32, "dbias": getattr(bias, "dtype", None)}.get(name)
        if name in ("out", "dq", "dk", "dv"):
            expected = inputs.q.dtype
        assert expected is None or x.dtype == expected, f"{name}: {x.dtype}, not {expected}"
    return {name: np.asarray(x) for name, x in found.items()}


def check(implementation: str, inputs: Inputs, *, block_sizes=None, **arguments) -> dict:
    """All tensors of a call against the oracle, within their budgets; returns them."""
    got = run(inputs, implementation=implementation, block_sizes=block_sizes, **arguments)
    judge(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **arguments).check(got)
    return got


def tile_sizes(implementation: str):
    """Block sizes worth comparing; only None where an implementation has no tiles."""
    if implementation == "reference":
        return [None]
    return [None, *(smalti.BlockSizes(*s) for s in ((32, 16), (64, 256)))]
