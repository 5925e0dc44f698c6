"""What each value of a mod's program depends on: decides what is computed where (`mods`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal as Constant

from smalti.attention.tpu.programs import CHEAP, COMPARISONS, Program, is_elementwise

# The arguments: score, batch entry, head, query, key; and query − key.
S, B, H, Q, K, DIFFERENCE = "s", "b", "h", "q", "k", "q-k"


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


class Dependence:
    """Of every variable of a program, what it depends on."""

    def __init__(self, program: Program):
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
            cheap = equation.primitive.name in CHEAP and is_elementwise(equation) and plain
            for variable in equation.outvars:
                self.made_by[variable] = equation
                self.reads[variable] = reads
                self.arrays_of[variable] = set().union(*(self.arrays_of[x] for x in made_of))
                expensive = set().union(*(self.expensive[x] for x in made_of))
                expensive = expensive if cheap else {variable}
                self.expensive[variable] = set() if reads <= {B, H} else expensive
                if equation.primitive.name not in COMPARISONS:
                    self.linear[variable] = linear

    def reads_as_many(self, variable, n: int) -> bool:
        """Whether it is made of an array of so many elements."""
        return any(int(np.prod(x.aval.shape)) >= n for x in self.arrays_of[variable])

    def ancestors(self, variable) -> list[Any]:
        """The equations that make it."""
        needed, queue = set(), [variable]
        while queue:
            x = queue.pop()
            if not isinstance(x, Constant) and x in self.made_by and x not in needed:
                needed.add(x)
                queue += self.made_by[x].invars
        return [e for e in self.program.equations if any(x in needed for x in e.outvars)]

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
