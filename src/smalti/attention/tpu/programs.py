"""Functions of scalars as flat programs, and their evaluation over tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import dtypes
from jax.extend.core import Literal as Constant

from smalti.masks.traced_mod import TracedMod, as_read
from smalti.varying import vary_over, varying_axes

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
# Calls that are evaluated by what is in them, and what they call it; and those that have a
# derivative of their own, so that they stay calls.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip
OWN_DERIVATIVES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


class Program(NamedTuple):
    """A function without calls in it."""

    arrays: tuple[Any, ...]  # variables
    captured: tuple[Any, ...]  # their values
    arguments: tuple[Any, ...]
    equations: list[Any]
    result: Any


def flattened(mod: TracedMod) -> Program:
    def run(*inputs):
        captured, arguments = inputs[: len(mod.captured)], inputs[len(mod.captured) :]
        return _inline(mod.jaxpr, captured, arguments)[0]

    like = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in mod.captured]
    like += [jax.ShapeDtypeStruct((), x.aval.dtype) for x in mod.jaxpr.invars]
    closed = jax.make_jaxpr(run)(*like)
    jaxpr, count = closed.jaxpr, len(mod.captured)
    arrays = (*jaxpr.invars[:count], *jaxpr.constvars)
    captured = (*mod.captured, *closed.consts)
    return Program(arrays, captured, tuple(jaxpr.invars[count:]), jaxpr.eqns, jaxpr.outvars[0])


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
            outputs = equation.primitive.bind(*as_read(inputs, equation), **parameters)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [_read(values, x) for x in jaxpr.outvars]


def is_elementwise(equation) -> bool:
    """Whether it is arithmetic on scalars, which over a tile is the same, element by element."""
    atoms, name = [*equation.invars, *equation.outvars], equation.primitive.name
    if len(equation.outvars) != 1 or any(x.aval.shape != () for x in atoms):
        return False
    if name in OWN_DERIVATIVES:
        inner = equation.params[OWN_DERIVATIVES[name]]
        return all(map(is_elementwise, _all_equations(inner)))
    return name in ELEMENTWISE


def _all_equations(jaxpr) -> list[Any]:
    """Those of a jaxpr and of the calls in it."""
    found = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        found += [equation] if inner is None else _all_equations(inner)
    return found


def evaluate(equations: Sequence[Any], values: dict[Any, Any], result):
    """Scalar equations over arrays that broadcast together; others on what they were traced for."""
    axes = varying_axes(list(values.values()))
    for equation in equations:
        inputs, rank = [_read(values, x) for x in equation.invars], 0
        if is_elementwise(equation):
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
