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
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.extend.core import Literal as Constant

from smalti.attention.tpu.tiles import Band
from smalti.eagerly import eagerly, remembered
from smalti.masks import Mask
from smalti.masks.mask_mod import BoundMaskMod
from smalti.masks.traced_mod import TracedMod, trace_mod
from smalti.varying import vary_over, varying_axes

Kind = Literal["number", "q", "kv", "relative", "tile"]  # along what an operand runs
Sizes = tuple[int, int, int, int]  # B, Hq, Sq, Sk
NOTHING: Band = (1, 0)  # the band that nobody is in

# Of which arguments a value depends: score, batch entry, head, query, key, and query − key.
S, B, H, Q, K, DIFFERENCE = "s", "b", "h", "q", "k", "q-k"
KINDS: dict[frozenset[str], Kind] = {
    frozenset(): "number",
    frozenset((Q,)): "q",
    frozenset((K,)): "kv",
    frozenset((DIFFERENCE,)): "relative",
}
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
# Arithmetic that costs a kernel next to nothing on a row. Other functions of a row are evaluated
# outside, once: division, powers, whatever Mosaic may not know.
CHEAP = COMPARISONS | {
    *("add", "sub", "neg", "mul", "and", "or", "not", "max", "min", "select_n", "abs"),
    *("convert_element_type",),
}
# What kernels compute on whole tiles besides.
ELEMENTWISE = CHEAP | {
    *("div", "rem", "sign", "floor", "ceil", "round", "clamp", "is_finite", "square", "sqrt"),
    *("rsqrt", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sin", "cos", "pow"),
    *("integer_pow", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
    *("stop_gradient", "copy"),
}
READS = ("squeeze", "reshape", "gather", "dynamic_slice")  # how an element of an array is read
# Calls that are evaluated by what is in them, and what they call it; and those that have a
# derivative of their own, so that they stay calls.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr"}
OWN_DERIVATIVES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


@dataclasses.dataclass(frozen=True)
class Operand:
    """What a kernel reads instead of the user's arrays: ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``;
    a relative one ``[B or 1, Hq or 1, 1, Sk − 1 + Sq]``, that of ``q_idx − kv_idx = −(Sk − 1)``
    first."""

    kind: Kind
    floating: bool  # float32, with a gradient; else int32


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

    def __call__(self, operands: Sequence[Any], *arguments):
        """The function over a tile. Operands and arguments broadcast to ``[keys, queries]``."""
        values = {**self.constants, **dict(zip(self.arguments, arguments, strict=True))}
        for variable, x in zip(self.reads, operands, strict=True):
            values[variable] = x != 0 if variable.aval.dtype == bool else x
        return _evaluate(self.equations, values, self.result)


NO_MOD = KernelMod((), (), {}, (), (), None)  # of what is not asked


def split(mod: TracedMod, sizes: Sizes, name: str) -> tuple[KernelMod, tuple[jax.Array, ...]]:
    """The part of ``mod`` that is for a kernel, and its operands. name: of the mod, for messages.

    Raises NotImplementedError for an array whose index depends on query and key otherwise than by
    their difference.
    """
    program = _flattened(mod)
    arrays, arguments = program.arrays, program.arguments
    facts = _Facts(program)
    hoisted: list[Any] = []
    needed: set[Any] = set()  # variables that the kernel computes
    constants: dict[Any, Any] = {}

    def need(variable) -> None:
        known = isinstance(variable, Constant) or variable in arguments or variable in constants
        if known or variable in needed or variable in hoisted:
            return
        kind = facts.kind(variable)
        if not facts.reads[variable] and not facts.arrays_of[variable]:
            constants[variable] = _constant(facts, program, variable)
            return
        if variable in arrays or kind == "number":
            hoisted.append(variable)
            return
        # Of a row, what is not cheap: one operand instead of all that cheap arithmetic makes of it.
        expensive = facts.expensive[variable]
        if kind != "tile" and (variable in expensive or len(expensive) > 1):
            hoisted.append(variable)
            return
        equation = facts.made_by[variable]
        if _is_elementwise(equation):
            needed.add(variable)
            for x in equation.invars:
                need(x)
            return
        by_score = S in facts.reads[variable]
        if facts.is_boolean(variable) and facts.reads_large(variable, sizes) and not by_score:
            hoisted.append(variable)
            return
        if equation.primitive.name in READS:
            why = (
                "it reads an array at an index that depends on the score, or on q_idx and kv_idx "
                "otherwise than by q_idx − kv_idx, which TPU kernels cannot do. Pass such an array "
                "as bias= (as mask=, if it is boolean)"
            )
        else:
            why = (
                f"it uses {equation.primitive.name!r} on what differs by score, or by query and "
                "key, which TPU kernels do not. Write it in arithmetic and jnp.where"
            )
        raise NotImplementedError(f"{name}: {why}, or use implementation='blockwise'.")

    need(program.result)
    operands = tuple(Operand(facts.kind(x), _is_floating(x)) for x in hoisted)
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
    program = _flattened(mod)
    facts, operand = _Facts(program), Operand("relative", False)
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


class _Program(NamedTuple):
    """A function without calls in it."""

    arrays: tuple[Any, ...]  # variables
    captured: tuple[Any, ...]  # their values
    arguments: tuple[Any, ...]
    equations: list[Any]
    result: Any


def _flattened(mod: TracedMod) -> _Program:
    def run(*inputs):
        captured, arguments = inputs[: len(mod.captured)], inputs[len(mod.captured) :]
        return _inline(mod.jaxpr, captured, arguments)[0]

    like = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in mod.captured]
    like += [jax.ShapeDtypeStruct((), x.aval.dtype) for x in mod.jaxpr.invars]
    closed = jax.make_jaxpr(run)(*like)
    jaxpr, count = closed.jaxpr, len(mod.captured)
    arrays = (*jaxpr.invars[:count], *jaxpr.constvars)
    captured = (*mod.captured, *closed.consts)
    return _Program(arrays, captured, tuple(jaxpr.invars[count:]), jaxpr.eqns, jaxpr.outvars[0])


def _inline(jaxpr, constants, arguments) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    for equation in jaxpr.eqns:
        inputs = [_read(values, x) for x in equation.invars]
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        if equation.primitive.name in ("pvary", "pcast"):  # of `shard_map`, whose axes end here
            outputs = inputs
        elif inner is not None:
            closed = hasattr(inner, "consts")
            body, consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
            outputs = _inline(body, consts, inputs)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **parameters)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [_read(values, x) for x in jaxpr.outvars]


class Linear(NamedTuple):
    """``q · q_idx + k · kv_idx + constant``"""

    q: int
    k: int
    constant: int

    @property
    def is_constant(self) -> bool:
        return self.q == self.k == 0

    @property
    def reads(self) -> frozenset[str]:
        if self.q == -self.k != 0:
            return frozenset((DIFFERENCE,))
        return frozenset(name for name, n in ((Q, self.q), (K, self.k)) if n)

    def times(self, n: int) -> Linear:
        return Linear(self.q * n, self.k * n, self.constant * n)

    def plus(self, other: Linear) -> Linear:
        return Linear(self.q + other.q, self.k + other.k, self.constant + other.constant)


class _Facts:
    """Of every variable, what it depends on."""

    def __init__(self, program: _Program):
        self.program = program
        self.made_by: dict[Any, Any] = {}
        names = (S, B, H, Q, K)[-len(program.arguments) :]
        inputs = [*program.arrays, *program.arguments]
        self.reads = {x: frozenset() for x in program.arrays}
        self.reads |= {x: frozenset((n,)) for x, n in zip(program.arguments, names, strict=True)}
        # The arrays that a variable is made of.
        self.arrays_of = {x: {x} if x in program.arrays else set() for x in inputs}
        # Of what it is made of, the last that is not `CHEAP`; numbers are operands anyway.
        self.expensive = {x: set() for x in inputs}
        indices = {Q: Linear(1, 0, 0), K: Linear(0, 1, 0)}
        self.linear: dict[Any, Linear | None] = {
            x: indices.get(n) for x, n in zip(program.arguments, names, strict=True)
        }
        for equation in program.equations:
            linear = self._linear(equation)
            if linear is not None and equation.primitive.name not in COMPARISONS:
                reads = linear.reads
            elif linear is not None and linear.reads == {DIFFERENCE}:
                reads = frozenset((DIFFERENCE,))
            else:
                reads = frozenset().union(*(self._reads(x) for x in equation.invars))
            made_of = [x for x in equation.invars if not isinstance(x, Constant)]
            # Of 32 bits: others kernels may not have, and gradients round once, after the sum.
            values = (x.aval.dtype for x in (*equation.invars, *equation.outvars))
            plain = all(jnp.issubdtype(x, jnp.bool_) or x.itemsize >= 4 for x in values)
            cheap = equation.primitive.name in CHEAP and _is_elementwise(equation) and plain
            for variable in equation.outvars:
                self.made_by[variable] = equation
                self.reads[variable] = reads
                self.arrays_of[variable] = set().union(*(self.arrays_of[x] for x in made_of))
                expensive = set().union(*(self.expensive[x] for x in made_of))
                expensive = expensive if cheap else {variable}
                self.expensive[variable] = set() if reads <= {B, H} else expensive
                if equation.primitive.name not in COMPARISONS:
                    self.linear[variable] = linear

    def kind(self, variable) -> Kind:
        return KINDS.get(self.reads[variable] - {B, H}, "tile")

    def is_boolean(self, variable) -> bool:
        return variable.aval.dtype == jnp.bool_

    def reads_large(self, variable, sizes: Sizes) -> bool:
        """Whether it is made of an array that is no smaller than all scores of a head."""
        arrays = self.arrays_of[variable]
        return any(int(np.prod(x.aval.shape)) >= sizes[2] * sizes[3] for x in arrays)

    def _reads(self, variable) -> frozenset[str]:
        return frozenset() if isinstance(variable, Constant) else self.reads[variable]

    def _linear(self, equation) -> Linear | None:
        """Of the result, or, for a comparison, of the difference that it compares with 0."""
        name, inputs = equation.primitive.name, equation.invars
        if name == "convert_element_type":
            dtype = equation.outvars[0].aval.dtype  # others may wrap around
            plain = jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize >= 4
            return self._linear_of(inputs[0]) if plain else None
        if name not in ("add", "sub", "mul", "neg", *COMPARISONS):
            return None
        forms = [form for form in map(self._linear_of, inputs) if form is not None]
        if len(forms) < len(inputs):
            return None
        if name == "neg":
            return forms[0].times(-1)
        a, b = forms
        if name == "mul":
            a, b = (b, a) if a.is_constant else (a, b)
            return a.times(b.constant) if b.is_constant else None
        return a.plus(b if name == "add" else b.times(-1))

    def _linear_of(self, variable) -> Linear | None:
        if not isinstance(variable, Constant):
            return self.linear.get(variable)
        number = variable.val
        whole = np.ndim(number) == 0 and jnp.issubdtype(jnp.result_type(number), jnp.integer)
        return Linear(0, 0, int(number)) if whole else None


def _is_elementwise(equation) -> bool:
    """Whether it is arithmetic on scalars, which over a tile is the same, element by element."""
    atoms, name = [*equation.invars, *equation.outvars], equation.primitive.name
    if len(equation.outvars) != 1 or any(x.aval.shape != () for x in atoms):
        return False
    if name in OWN_DERIVATIVES:
        inner = equation.params[OWN_DERIVATIVES[name]]
        return all(map(_is_elementwise, _all_equations(inner)))
    return name in ELEMENTWISE


def _all_equations(jaxpr) -> list[Any]:
    """Those of a jaxpr and of the calls in it."""
    found = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        found += [equation] if inner is None else _all_equations(inner)
    return found


def _is_floating(variable) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.floating))


def _outside(program: _Program, captured, variable, facts: _Facts, operand: Operand, sizes: Sizes):
    """A variable over all that it depends on, as an operand."""
    batch, heads, q_len, kv_len = sizes
    reads = facts.reads[variable]

    def evaluate(b, h, q, k):
        values = dict(zip(program.arrays, captured, strict=True))
        scalars = (jnp.float32(0), b, h, q, k)[-len(program.arguments) :]
        values |= dict(zip(program.arguments, scalars, strict=True))
        return _evaluate(_ancestors(facts, program, variable), values, variable)

    nothing = jnp.zeros(1, jnp.int32)
    b, h = (
        jnp.arange(n, dtype=jnp.int32) if name in reads else nothing
        for name, n in ((B, batch), (H, heads))
    )
    q, k = nothing, nothing
    if operand.kind in ("q", "tile"):
        q = jnp.arange(q_len, dtype=jnp.int32)
    if operand.kind in ("kv", "tile"):
        k = jnp.arange(kv_len, dtype=jnp.int32)
    if operand.kind == "relative":
        q = jnp.arange(1 - kv_len, q_len, dtype=jnp.int32)
    over = evaluate
    for axis in (3, 2, 1, 0):
        over = jax.vmap(over, in_axes=tuple(0 if n == axis else None for n in range(4)))
    x = over(b, h, q, k)
    if operand.kind == "relative":
        x = x.swapaxes(2, 3)
    dtype = jnp.float32 if operand.floating else jnp.int32
    return x.astype(jnp.bfloat16 if operand.kind == "tile" else dtype)


def _constant(facts: _Facts, program: _Program, variable):
    # It may be made of arguments that it does not depend on, as i − i is.
    zeros = {x: jnp.zeros((), x.aval.dtype) for x in program.arguments}
    return eagerly(_evaluate, _ancestors(facts, program, variable), zeros, variable)


def _ancestors(facts: _Facts, program: _Program, variable) -> list[Any]:
    needed, queue = set(), [variable]
    while queue:
        x = queue.pop()
        if not isinstance(x, Constant) and x in facts.made_by and x not in needed:
            needed.add(x)
            queue += facts.made_by[x].invars
    return [e for e in program.equations if any(x in needed for x in e.outvars)]


def _evaluate(equations: Sequence[Any], values: dict[Any, Any], result):
    """Scalar equations over arrays that broadcast together; others on what they were traced for."""
    axes = varying_axes(list(values.values()))
    for equation in equations:
        inputs, rank = [_read(values, x) for x in equation.invars], 0
        if _is_elementwise(equation):
            shape = jnp.broadcast_shapes(*map(jnp.shape, inputs))
            rank = len(shape)
            inputs = [
                jnp.broadcast_to(jnp.asarray(x, dtypes.canonicalize_dtype(atom.aval.dtype)), shape)
                for x, atom in zip(inputs, equation.invars, strict=True)
            ]
        if axes:
            inputs = vary_over([jnp.asarray(x) for x in inputs], axes)

        def bind(*inputs, equation=equation):
            parameters = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **parameters)
            return outputs if equation.primitive.multiple_results else [outputs]

        if equation.primitive.name in OWN_DERIVATIVES:  # what is in it is of scalars
            for _ in range(rank):
                bind = jax.vmap(bind)
        outputs = bind(*inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return _read(values, result)


def _read(values: dict[Any, Any], atom):
    return atom.val if isinstance(atom, Constant) else values[atom]
