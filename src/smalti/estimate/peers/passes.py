"""From a peer's forward function to the program of one pass.

- "forward": (q, k, v) → out.
- "both": (q, k, v, dout) → (out, dq, dk, dv), one program, as a training step would hold it.
- "backward": (dout, *residuals) → (dq, dk, dv). The residuals are those arrays that the peer's own
  forward keeps under `jax.vjp` (for splash: the scaled q, k, v, out and lse; for XLA: the
  probabilities), taken as arguments. So nothing of the forward is in it but what the peer itself
  recomputes, and no private function of any library is called. What the forward keeps that does
  not depend on q, k, v (a mask and its tables) is made in the program, as it is in "both".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

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
    kept = traced.jaxpr.outvars
    # Which of them depend on q, k or v: those whose computation, alone, still needs one.
    given = [any(_only(traced.jaxpr, [other is var for other in kept])[1]) for var in kept]
    rest = ClosedJaxpr(_only(traced.jaxpr, [not needed for needed in given])[0], traced.consts)

    args = [case.output()]
    places: dict[Any, int] = {}  # where in `args` a residual comes in; q may be kept twice
    for var, needed in zip(kept, given, strict=True):
        if needed and var not in places:
            places[var] = len(args)
            args.append(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))

    def fn(*arrays):
        computed = iter(jaxpr_as_fun(rest)())
        leaves = [
            arrays[places[var]] if needed else next(computed)
            for var, needed in zip(kept, given, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)(arrays[0])

    return fn, tuple(args)


def _only(jaxpr: Any, outputs: list[bool]) -> tuple[Any, list[bool]]:
    """The part of a jaxpr that computes these outputs, and which of its inputs it reads."""
    return partial_eval.dce_jaxpr(jaxpr, outputs)
