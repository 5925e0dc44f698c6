"""How often a loop runs, read from its condition, its body and what it starts with.

A loop's `estimated_cycles` are those of one pass, whatever its length, so this number decides a
module's time. Read are loops that compare values which grow by a constant each pass, that is all
that `lax.scan` and `lax.fori_loop` with static bounds make; any other must be stated.
"""

from dataclasses import dataclass

from smalti.estimate.errors import Unstated
from smalti.estimate.module.hlo import Instruction
from smalti.estimate.module.shapes import BITS, Shape
from smalti.estimate.module.values import Frame, Values


@dataclass(frozen=True)
class _Linear:
    """`constant` plus each element of the loop's state times its factor."""

    factors: dict[int, int]  # by index into the state
    constant: int

    def plus(self, other: "_Linear", times: int = 1) -> "_Linear":
        factors = dict(self.factors)
        for index, factor in other.factors.items():
            factors[index] = factors.get(index, 0) + times * factor
        factors = {index: factor for index, factor in factors.items() if factor}
        return _Linear(factors, self.constant + times * other.constant)


class _Unread(Exception):
    """Why a trip count cannot be read."""


def trip_count(values: Values, frame: Frame, loop: Instruction) -> int:
    """How often the body of a `while` in `frame` runs.

    Raises Unstated, naming the loop and why, where the module does not say.
    """
    known = loop.backend.get("known_trip_count", {}).get("n")
    if known is not None and str(known).isdigit():
        return int(known)
    try:
        return _read(values, frame, loop)
    except _Unread as why:
        where = f" ({loop.op_name})" if loop.op_name else ""
        raise Unstated(
            f"how often the loop %{loop.name}{where} runs is not in the program: {why}. "
            f'State it: trip_counts={{"{loop.name}": 12}}'
        ) from None


def _read(values: Values, frame: Frame, loop: Instruction) -> int:
    condition = values.enter(frame, loop, loop.attributes["condition"].lstrip("%"))
    body = values.enter(frame, loop, loop.attributes["body"].lstrip("%"))
    end = values.trace(condition, condition.computation.root.name)
    compare = end.instruction
    if compare.opcode != "compare":
        raise _Unread(f"its condition is a {compare.opcode}, not a comparison of counters")
    sides = [_linear(values, end.frame, name, (), condition) for name in compare.operands]
    shape = end.frame.computation.by_name[compare.operands[0]].shape
    starts, steps = [], []
    for side in sides:
        start, step = side.constant, 0
        for index, factor in side.factors.items():
            start += factor * _start(values, frame, loop, index)
            step += factor * _step(values, body, index)
        starts.append(start)
        steps.append(step)
    direction = compare.attributes.get("direction", "")
    count = _passes(starts[0] - starts[1], steps[0] - steps[1], direction)
    for start, step in zip(starts, steps, strict=True):
        _check_range(start, step, count, shape)
    return count


def _linear(values: Values, frame: Frame, name: str, path: tuple[int, ...], loop: Frame) -> _Linear:
    """A scalar as a linear function of the loop's state, seen from the loop's own frame."""
    end = values.trace(frame, name, path)
    i, operands = end.instruction, end.instruction.operands
    if i.opcode == "parameter" and end.frame is loop and len(end.path) == 1:
        return _Linear({end.path[0]: 1}, 0)
    if end.path:
        raise _Unread(f"it depends on %{i.name}, a {i.opcode}")
    scalar = i.shape.parts is None and i.shape.elements == 1 and i.shape.dtype[0] in "su"
    if scalar and i.opcode == "constant":
        value = values.constant(end.frame, i.name)
        if value is not None:
            return _Linear({}, int(value.reshape(())))
    elif scalar and i.opcode in ("add", "subtract", "multiply"):
        left, right = (_linear(values, end.frame, operand, (), loop) for operand in operands)
        if i.opcode != "multiply":
            return left.plus(right, 1 if i.opcode == "add" else -1)
        if right.factors:
            left, right = right, left
        if not right.factors:
            return _Linear({}, 0).plus(left, right.constant)
    elif scalar and i.opcode == "negate":
        return _Linear({}, 0).plus(_linear(values, end.frame, operands[0], (), loop), -1)
    elif scalar and i.opcode in ("bitcast", "reshape", "convert"):
        source = end.frame.computation.by_name[operands[0]].shape
        # A counter of another width could overflow unseen.
        if source.parts is None and source.dtype[0] in "su" and source.bits == i.shape.bits:
            return _linear(values, end.frame, operands[0], (), loop)
    raise _Unread(f"it depends on %{i.name}, a {i.opcode}")


def _start(values: Values, frame: Frame, loop: Instruction, index: int) -> int:
    value = values.constant(frame, loop.operands[0], (index,))
    if value is None or value.size != 1:
        raise _Unread(f"element {index} of its state starts with a value that is no constant")
    return int(value.reshape(()))


def _step(values: Values, body: Frame, index: int) -> int:
    after = _linear(values, body, body.computation.root.name, (index,), body)
    if after.factors != {index: 1}:
        raise _Unread(f"element {index} of its state does not grow by a constant")
    return after.constant


def _passes(start: int, step: int, direction: str) -> int:
    """How many t from 0 on have start + step·t on the given side of 0 before one has not."""
    if direction in ("GT", "GE"):
        start, step = -start, -step
    if direction in ("LT", "GT", "LE", "GE"):
        limit = 0 if direction in ("LT", "GT") else 1
        if start >= limit:
            return 0
        if step > 0:
            return -((start - limit) // step)
    elif direction == "NE":
        if start == 0:
            return 0
        if step != 0 and start % step == 0 and start // step < 0:
            return -(start // step)
    elif direction == "EQ":
        if start != 0:
            return 0
        if step != 0:
            return 1
    else:
        raise _Unread(f"it compares by {direction!r}")
    raise _Unread("its condition stays true until a counter overflows")


def _check_range(start: int, step: int, count: int, shape: Shape) -> None:
    bits = BITS[shape.dtype]
    low = 0 if shape.dtype[0] == "u" else -(1 << (bits - 1))
    high = (1 << bits) - 1 + low
    if not all(low <= value <= high for value in (start, start + step * count)):
        raise _Unread(f"a counter of type {shape.dtype} overflows")
