"""Elementwise user functions (``mask_mod``, ``score_mod``) as data: a program and its arrays.

A mod is traced once with scalars, so it means the same whatever tile it is evaluated on, and the
arrays it captured come out as explicit inputs: gradients, ``jit``, ``scan`` and ``shard_map`` then
see them. Evaluation over a tile maps the scalar program over one axis at a time, so that a part
that reads only ``q_idx`` is computed ``block_q`` times, not ``block_q × block_kv`` times.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from smalti.masks.tiles import is_known
from smalti.varying import vary_over, varying_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TracedMod:
    """``captured`` are the arrays the function closed over; ``depends[i]`` says whether the result
    reads argument ``i``."""

    captured: tuple[Any, ...]
    jaxpr: Any = dataclasses.field(metadata={"static": True})
    depends: tuple[bool, ...] = dataclasses.field(metadata={"static": True})

    @property
    def is_known(self) -> bool:
        """Whether every captured array has a value while tracing."""
        return is_known(self.captured)

    @property
    def floating(self) -> list:
        """The captured arrays that can have a gradient."""
        return [x for x in self.captured if _is_floating(x)]

    def without_floating(self) -> TracedMod:
        """The mod with its floating captured arrays taken out (None)."""
        kept = (None if _is_floating(x) else x for x in self.captured)
        return dataclasses.replace(self, captured=tuple(kept))

    def with_floating(self, arrays: list) -> TracedMod:
        """The mod with its floating captured arrays, in place or taken out, replaced in order."""
        rest = iter(arrays)
        replaced = (next(rest) if x is None or _is_floating(x) else x for x in self.captured)
        return dataclasses.replace(self, captured=tuple(replaced))

    def widened(self) -> TracedMod:
        """The mod with captured arrays of half precision in float32: they are rounded to what the
        program was traced with after they are read (`as_read`), so that the gradients of what many
        positions read are summed in float32."""
        return self.with_floating(
            [x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x for x in self.floating]
        )

    def call(self, *args):
        """The scalar program on scalars."""
        (out,) = _evaluate(self.jaxpr, self.captured, *args)
        return out

    def over_tile(self, b, h, q_idx, kv_idx):
        """A ``mask_mod`` over ``b [B], h [H], q_idx [Q], kv_idx [K]``: ``[B, H, Q, K]``."""
        call = self.call
        for axis in (3, 2, 1, 0):
            call = jax.vmap(call, in_axes=tuple(0 if i == axis else None for i in range(4)))
        return call(b, h, q_idx, kv_idx)

    def over_scores(self, scores, b, h, q_idx, kv_idx):
        """A ``score_mod`` over ``scores [B, H, Q, K]`` and index vectors as above."""
        call = self.call
        for axis in (3, 2, 1, 0):
            call = jax.vmap(call, in_axes=(0, *(0 if i == axis else None for i in range(4))))
        return call(scores, b, h, q_idx, kv_idx)


def trace_mod(function: Callable, avals, *, name: str, result) -> TracedMod:
    """Trace ``function`` with scalars of ``avals``; its result must be one scalar.

    Raises ValueError if the function cannot be traced elementwise or returns something else than
    one scalar of the kind ``result`` (bool, or float for any floating dtype).
    """
    try:
        closed = jax.make_jaxpr(function)(*avals)
    except jax.errors.ConcretizationTypeError as error:
        raise ValueError(
            f"{name}: it branches on the value of an index or score. It is traced elementwise, so "
            "use `&`, `|`, `~` and jnp.where instead of `and`, `or`, `not` and `if`."
        ) from error
    except (
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        raise ValueError(
            f"{name}: it indexes a NumPy array or a list by a traced index. Wrap what it captures "
            "in jnp.asarray, which also makes it differentiable."
        ) from error
    except TypeError as error:
        arguments = "(score, b, h, q_idx, kv_idx)" if len(avals) == 5 else "(b, h, q_idx, kv_idx)"
        takes = _takes(function, len(avals))
        if takes:  # an error of its own
            raise
        must = "it must take" if takes is False else "it does not say what it takes; it is given"
        raise ValueError(f"{name}: {must} {arguments}; calling it gave: {error}") from error
    outs = closed.out_avals
    kind = jnp.bool_ if result is bool else jnp.floating
    if len(outs) != 1 or outs[0].shape != () or not jnp.issubdtype(outs[0].dtype, kind):
        got, advice = ", ".join(str(aval) for aval in outs), ""
        if not outs:
            got, advice = "None", " Is a `return` missing?"
        elif result is bool and jnp.issubdtype(outs[0].dtype, jnp.floating):
            advice = " What is to be added to scores goes into score_mod or bias."
        raise ValueError(
            f"{name}: for scalar arguments it must return one scalar, "
            f"{'boolean' if result is bool else 'floating-point'}; it returned ({got}).{advice}"
        )
    return TracedMod(tuple(closed.consts), closed.jaxpr, _depends(closed.jaxpr))


# What passes on elements of an array as they are.
READS = (
    "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "reshape", "rev", "slice",
    "squeeze", "transpose",
)  # fmt: skip


def as_read(inputs, equation) -> list:
    """``inputs`` of an equation in the floating dtypes that it was traced with; but what passes on
    elements takes them wider."""
    dtypes = {jnp.result_type(x) for x in inputs if _is_floating(x)}
    if equation.primitive.name in READS and len(dtypes) <= 1:
        return list(inputs)
    pairs = zip(inputs, (atom.aval for atom in equation.invars), strict=True)
    return [
        x.astype(aval.dtype) if _is_floating(x) and x.dtype != aval.dtype else x
        for x, aval in pairs
    ]


def _takes(function: Callable, number: int) -> bool | None:
    """Whether it can be called with so many arguments; None where it does not say."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*range(number))
    except TypeError:
        return False
    return True


def _is_floating(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _depends(jaxpr) -> tuple[bool, ...]:
    """For each input, whether the output may read it (calls are taken to read all they get)."""
    reads = {var: {i} for i, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        sources = [reads.get(v, set()) for v in eqn.invars if not isinstance(v, Literal)]
        for var in eqn.outvars:
            reads[var] = set().union(*sources)
    (out,) = jaxpr.outvars
    used = set() if isinstance(out, Literal) else reads.get(out, set())
    return tuple(i in used for i in range(len(jaxpr.invars)))


def _evaluate(jaxpr, captured, *args):
    """`jax.core.eval_jaxpr` in another context than that of the trace: on another mesh, or under
    `shard_map` for inputs that vary over more axes. The program's own casts are replaced by casts
    to all of their axes."""
    axes = varying_axes((captured, args))
    cast = lambda values: vary_over(list(values), axes)  # noqa: E731
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], cast([*captured, *args]), strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        inputs, name = cast(read(atom) for atom in eqn.invars), eqn.primitive.name
        if name in ("pvary", "pcast"):
            outputs = inputs
        elif name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            outputs = _evaluate(inner.jaxpr, inner.consts, *inputs)
        else:
            inputs = as_read(inputs, eqn)
            outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
