"""From a peer's forward function to the program of one pass.

- "forward": (q, k, v) → out.
- "both": (q, k, v, dout) → (out, dq, dk, dv), one program, as a training step would hold it.
- "backward": (dout, *residuals) → (dq, dk, dv). The residuals are those arrays that the peer's own
  forward keeps under `jax.vjp` (for splash: the scaled q, k, v, out and lse; for XLA: the
  probabilities), taken as arguments. So nothing of the forward is in it but what the peer itself
  recomputes, and no private function of any library is called. What the forward keeps and does not
  depend on q, k, v (a mask's tables) stays a constant, as it is when the two are one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

from smalti.estimate.peers.case import AttentionCase, known
from smalti.estimate.peers.variant import Call

PASSES = ("forward", "backward", "both")

Forward = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def program(name: str, forward: Forward, case: AttentionCase, which: str) -> Call:
    """The function of one pass and its arguments' shapes; arrays are in the case's layout.

    `name` becomes the function's, and so the compiled module's. ValueError: an unknown pass.
    """
    known("pass", which, PASSES)
    if which == "backward":
        fn, args = _backward(forward, case)
    elif which == "both":
        fn, args = _both(forward), (*case.inputs(), case.output())
    else:
        fn, args = _alone(forward), case.inputs()
    fn.__name__ = fn.__qualname__ = f"{name}_{which}"
    return fn, args


def _alone(forward: Forward):
    def fn(q, k, v):
        return forward(q, k, v)

    return fn


def _both(forward: Forward):
    def fn(q, k, v, dout):
        out, vjp = jax.vjp(forward, q, k, v)
        return (out, *vjp(dout))

    return fn


def _backward(forward: Forward, case: AttentionCase) -> Call:
    structure: Any = None

    def residuals(q, k, v):
        nonlocal structure
        leaves, structure = jax.tree.flatten(jax.vjp(forward, q, k, v)[1])
        return leaves

    traced = jax.make_jaxpr(residuals)(*case.inputs())
    constants = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    args = [case.output()]
    places: dict[Any, int] = {}  # where in `args` a residual comes in; q may be kept twice
    for var in traced.jaxpr.outvars:
        if not isinstance(var, Literal) and var not in constants and var not in places:
            places[var] = len(args)
            args.append(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))

    def fn(*given):
        leaves = []
        for var in traced.jaxpr.outvars:
            if isinstance(var, Literal):
                leaves.append(var.val)
            else:
                leaves.append(given[places[var]] if var in places else constants[var])
        return jax.tree.unflatten(structure, leaves)(given[0])

    return fn, tuple(args)
