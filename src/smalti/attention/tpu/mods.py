"""Elementwise functions of the user (masks, ``score_mod``) inside of kernels.

A function of scalars ``(score, b, h, q_idx, kv_idx)`` is split in two. What reads arrays is
evaluated outside of the kernel, over all that it depends on: numbers for each batch entry and head,
rows over queries, over keys, or over their difference. What is left is arithmetic, which the kernel
does on whole tiles. So any indexing works whose indices come from ``b``, ``h`` and one of
``q_idx``, ``kv_idx`` and ``q_idx − kv_idx``; and gradients of arrays are those of the rows, which
JAX carries on to the arrays themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal as Constant

from smalti.attention.tpu.dependence import DIFFERENCE, B, Dependence, H, K, Q, S
from smalti.attention.tpu.programs import Program, evaluate, flattened, is_elementwise
from smalti.attention.tpu.tiles import Band
from smalti.eagerly import eagerly, remembered
from smalti.masks import Mask
from smalti.masks.mask_mod import BoundMaskMod
from smalti.masks.traced_mod import READS, TracedMod, trace_mod
from smalti.varying import vary_over, varying_axes

Kind = Literal["number", "q", "kv", "relative", "scores"]  # along what an operand runs
Sizes = tuple[int, int, int, int]  # B, Hq, Sq, Sk
NOTHING: Band = (1, 0)  # the band that nobody is in

KINDS: dict[frozenset[str], Kind] = {
    frozenset(): "number",
    frozenset((Q,)): "q",
    frozenset((K,)): "kv",
    frozenset((DIFFERENCE,)): "relative",
}


@dataclasses.dataclass(frozen=True)
class Operand:
    """What a kernel reads instead of the user's arrays: ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``;
    a relative one ``[B or 1, Hq or 1, 1, Sk − 1 + Sq]``, that of ``q_idx − kv_idx = −(Sk − 1)``
    first."""

    kind: Kind
    floating: bool  # float32, with a gradient; else int32, or bfloat16 that is 0 or 1 by score


@dataclasses.dataclass(frozen=True, eq=False)
class KernelMod:
    """What a kernel computes of a function: ``equations``, from operands and arguments."""

    operands: tuple[Operand, ...]
    reads: tuple[Any, ...]  # the variables that the operands stand for
    constants: dict[Any, Any]
    arguments: tuple[Any, ...]  # those of (score,) b, h, q_idx, kv_idx
    equations: tuple[Any, ...]
    result: Any

    @property
    def is_given(self) -> bool:
        return self.result is not None

    @property
    def floating(self) -> tuple[int, ...]:
        """The operands that have gradients, by number."""
        return tuple(n for n, operand in enumerate(self.operands) if operand.floating)

    def __call__(self, operands: Sequence[Any], *arguments):
        """The function over a tile. Operands and arguments broadcast to ``[keys, queries]``."""
        values = {**self.constants, **dict(zip(self.arguments, arguments, strict=True))}
        for variable, x in zip(self.reads, operands, strict=True):
            values[variable] = x != 0 if variable.aval.dtype == bool else x
        return evaluate(self.equations, values, self.result)


NO_MOD = KernelMod((), (), {}, (), (), None)  # of what is not asked


def split(mod: TracedMod, sizes: Sizes, name: str) -> tuple[KernelMod, tuple[jax.Array, ...]]:
    """The part of ``mod`` that is for a kernel, and its operands. name: of the mod, for messages.

    Raises NotImplementedError for an array whose index depends on query and key otherwise than by
    their difference.
    """
    program = flattened(mod)
    arrays, arguments = program.arrays, program.arguments
    facts = Dependence(program)
    hoisted: list[Any] = []
    needed: set[Any] = set()  # variables that the kernel computes
    constants: dict[Any, Any] = {}

    def need(variable) -> None:
        known = isinstance(variable, Constant) or variable in arguments or variable in constants
        if known or variable in needed or variable in hoisted:
            return
        kind = _kind(facts, variable)
        if not facts.reads[variable] and not facts.arrays_of[variable]:
            constants[variable] = _constant(facts, program, variable)
            return
        if variable in arrays or kind == "number":
            hoisted.append(variable)
            return
        # Of a row, what is not cheap: one operand instead of all that cheap arithmetic makes of it.
        expensive = facts.expensive[variable]
        if kind != "scores" and (variable in expensive or len(expensive) > 1):
            hoisted.append(variable)
            return
        equation = facts.made_by[variable]
        if is_elementwise(equation):
            needed.add(variable)
            for x in equation.invars:
                need(x)
            return
        by_score = S in facts.reads[variable]
        large = facts.reads_as_many(variable, sizes[2] * sizes[3])
        if _is_boolean(variable) and large and not by_score:
            hoisted.append(variable)
            return
        # What is read, if an array is: captured, or made alike for all.
        made_by: Any = equation
        while made_by is not None and made_by.primitive.name in READS:
            source = made_by.invars[0]
            before = None if isinstance(source, Constant) else facts.made_by.get(source)
            if before is not None and is_elementwise(before):  # it makes an array of scalars
                break
            made_by = before
        if made_by is None or (made_by is not equation and is_array_for_all(facts, made_by)):
            why = (
                "it reads an array at an index that depends on the score, or on q_idx and kv_idx "
                "otherwise than by q_idx − kv_idx, which TPU kernels cannot do. Pass such an array "
                "as bias= (as mask=, if it is boolean)"
            )
        else:
            shape = made_by.outvars[0].aval.shape
            what = f" to make an array of shape {shape}" if shape else ""
            why = (
                f"it uses {made_by.primitive.name!r}{what} on what differs by score, or by query "
                "and key, which TPU kernels do not. Write it in arithmetic on scalars and jnp.where"
            )
        raise NotImplementedError(f"{name}: {why}, or use implementation='blockwise'.")

    need(program.result)
    operands = tuple(Operand(_kind(facts, x), _is_floating(x)) for x in hoisted)
    made = tuple(
        _outside(program, program.captured, variable, facts, operand, sizes)
        for variable, operand in zip(hoisted, operands, strict=True)
    )
    equations = tuple(e for e in program.equations if e.outvars[0] in needed)
    kernel_mod = KernelMod(
        operands, tuple(hoisted), constants, arguments, equations, program.result
    )
    return kernel_mod, made


@remembered
def find_band(mask: Mask, sizes: Sizes) -> Band | None:
    """``(low, high)`` where a mask is ``low ≤ kv_idx − q_idx ≤ high`` with known bounds (None: no
    bound), else None."""
    mod = traced_mask(mask)
    program = flattened(mod)
    facts, operand = Dependence(program), Operand("relative", False)
    if isinstance(program.result, Constant):
        return (None, None) if program.result.val else NOTHING
    if not mod.is_known or not facts.reads[program.result] <= {DIFFERENCE}:
        return None
    _, _, q_len, kv_len = sizes
    found = eagerly(
        jax.jit(
            lambda captured: _outside(program, captured, program.result, facts, operand, sizes)
        ),
        program.captured,
    )
    visible = found.reshape(-1)[::-1] != 0  # by kv_idx − q_idx, from 1 − Sq to Sk − 1
    visible = np.broadcast_to(visible, q_len + kv_len - 1)
    (places,) = np.nonzero(visible)
    if not len(places):
        return NOTHING
    first, last = int(places[0]), int(places[-1])
    if not visible[first : last + 1].all():
        return None
    low = None if first == 0 else first - (q_len - 1)
    high = None if last == len(visible) - 1 else last - (q_len - 1)
    return low, high


def traced_mask(mask: Mask) -> TracedMod:
    """A mask bound to a call as a function of scalars and what arrays it reads."""
    if isinstance(mask, BoundMaskMod):
        return mask.mod
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return trace_mod(mask, (index,) * 4, name="mask", result=bool)


def _kind(facts: Dependence, variable) -> Kind:
    return KINDS.get(facts.reads[variable] - {B, H}, "scores")


def _is_floating(variable) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.floating))


def is_array_for_all(facts: Dependence, equation) -> bool:
    """Whether it makes an array that is the same for all queries, keys and scores."""
    return not facts.reads[equation.outvars[0]] and equation.outvars[0].aval.shape != ()


def _is_boolean(variable) -> bool:
    return variable.aval.dtype == jnp.bool_


def _outside(
    program: Program, captured, variable, facts: Dependence, operand: Operand, sizes: Sizes
):
    """A variable over all that it depends on, as an operand."""
    batch, heads, q_len, kv_len = sizes
    reads = facts.reads[variable]

    def of_scalars(captured, b, h, q, k):
        values = dict(zip(program.arrays, captured, strict=True))
        scalars = (jnp.float32(0), b, h, q, k)[-len(program.arguments) :]
        values |= dict(zip(program.arguments, scalars, strict=True))
        return evaluate(facts.ancestors(variable), values, variable)

    nothing = np.zeros(1, np.int32)
    b, h = (
        np.arange(n, dtype=np.int32) if name in reads else nothing
        for name, n in ((B, batch), (H, heads))
    )
    q, k = nothing, nothing
    if operand.kind in ("q", "scores"):
        q = np.arange(q_len, dtype=np.int32)
    if operand.kind in ("kv", "scores"):
        k = np.arange(kv_len, dtype=np.int32)
    if operand.kind == "relative":
        q = np.arange(1 - kv_len, q_len, dtype=np.int32)
    x = _over(of_scalars, captured, (b, h, q, k))
    if operand.kind == "relative":
        x = x.swapaxes(2, 3)
    dtype = jnp.float32 if operand.floating else jnp.int32
    return x.astype(jnp.bfloat16 if operand.kind == "scores" else dtype)


def _over(of_scalars, captured, indices):
    """``of_scalars(captured, b, h, q, k)`` over vectors of indices: ``[b, h, q, k]``.

    Its gradient is that of the places whose cotangent is not 0. Nobody sees the others, where the
    derivative may be infinite, and 0 times it NaN: there it is taken at one of the former.
    """
    is_floating = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in captured]
    floats = [x for x, yes in zip(captured, is_floating, strict=True) if yes]
    rest = [x for x, yes in zip(captured, is_floating, strict=True) if not yes]
    floats, rest = vary_over((floats, rest), varying_axes((floats, rest)))

    def joined(floats, rest) -> list:
        of = {True: iter(floats), False: iter(rest)}
        return [next(of[yes]) for yes in is_floating]

    def all_of(floats, rest):
        over = functools.partial(of_scalars, joined(floats, rest))
        for axis in (3, 2, 1, 0):
            over = jax.vmap(over, in_axes=tuple(0 if n == axis else None for n in range(4)))
        return over(*indices)

    def forward(floats, rest):
        return all_of(floats, rest), (floats, rest)

    def backward(residuals, cotangent):
        floats, rest = residuals
        used = (cotangent != 0).reshape(-1)
        pick = jnp.argmax(used)
        places = (jnp.broadcast_to(x, cotangent.shape).reshape(-1) for x in np.ix_(*indices))
        places = [jnp.where(used, x, x[pick]) for x in places]

        def of_places(floats):
            return jax.vmap(functools.partial(of_scalars, joined(floats, rest)))(*places)

        _, pull = jax.vjp(of_places, floats)
        (gradients,) = pull(cotangent.reshape(-1))
        return [jnp.where(used.any(), x, 0) for x in gradients], None

    over = jax.custom_vjp(all_of)
    over.defvjp(forward, backward)
    return over(floats, rest)


def _constant(facts: Dependence, program: Program, variable):
    # It may be made of arguments that it does not depend on, as i − i is.
    zeros = {x: jnp.zeros((), x.aval.dtype) for x in program.arguments}
    return eagerly(evaluate, facts.ancestors(variable), zeros, variable)
