"""What a module itself says about its values: which are constants, and which arrays they hold.

A Pallas kernel's control flow hangs on its scalar-prefetch operands. They are constants of the
module, moved about by copies and carried unchanged through loops, or they are not known here.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes  # jax needs it too, so it is always there
import numpy as np

from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.module.hlo import Computation, Instruction, Module
from smalti.estimate.module.shapes import Shape


@dataclass(frozen=True, eq=False)
class Frame:
    """A computation as one caller enters it; the entry has no caller."""

    computation: Computation
    parent: "Frame | None" = None
    caller: Instruction | None = None  # in the parent's computation
    branch: int = 0  # of a conditional


class Definition(NamedTuple):
    """Where a value was made: an instruction in a frame, and a path into its tuple."""

    frame: Frame
    instruction: Instruction
    path: tuple[int, ...]


class Values:
    """Follows values through one module."""

    def __init__(self, module: Module):
        self.module = module
        self._carried: dict[tuple[Instruction, int], bool] = {}

    def enter(self, frame: Frame, caller: Instruction, name: str, branch: int = 0) -> Frame:
        """The frame of a computation that an instruction of `frame` calls."""
        return Frame(self.module.computations[name], frame, caller, branch)

    def trace(self, frame: Frame, name: str, path: tuple[int, ...] = ()) -> Definition:
        """Back through whatever only moves a value: copies, tuples, calls, unchanged loop state."""
        while True:
            i = frame.computation.by_name[name]
            if i.opcode == "get-tuple-element":
                path = (int(i.attributes["index"]), *path)
                name = i.operands[0]
            elif i.opcode == "tuple" and path:
                name, path = i.operands[path[0]], path[1:]
            elif i.opcode in ("copy", "opt-barrier", "add-dependency"):
                name = i.operands[0]
            elif i.opcode == "copy-done":
                name, path = i.operands[0], (0, *path)
            elif i.opcode == "copy-start" and path and path[0] in (0, 1):
                name, path = i.operands[0], path[1:]  # (destination, source, context)
            elif _same_array(i, frame) or (
                i.opcode == "while" and path and self.is_unchanged(i, path[0])
            ):
                name = i.operands[0]
            elif i.opcode in ("call", "fusion"):
                frame = self.enter(frame, i, i.called[0])
                name = frame.computation.root.name
            elif i.opcode == "parameter":
                outer = self._argument(frame, i, path)
                if outer is None:
                    return Definition(frame, i, path)
                frame, name = outer
            else:
                return Definition(frame, i, path)

    def _argument(
        self, frame: Frame, parameter: Instruction, path: tuple[int, ...]
    ) -> tuple[Frame, str] | None:
        """The frame and name of what a caller passes, or None where that is not one value."""
        if frame.caller is None or frame.parent is None:
            return None
        caller = frame.caller
        if caller.opcode == "while":
            if not path or not self.is_unchanged(caller, path[0]):
                return None
            return frame.parent, caller.operands[0]
        if caller.opcode == "conditional":
            return frame.parent, caller.operands[1 + frame.branch]
        number = int(parameter.literal)
        if number >= len(caller.operands):  # an asynchronous call may get them later
            return None
        return frame.parent, caller.operands[number]

    def is_unchanged(self, loop: Instruction, index: int) -> bool:
        """Whether a loop hands on one element of its state as it got it."""
        key = (loop, index)
        if key not in self._carried:
            body = Frame(self.module.computations[loop.attributes["body"].lstrip("%")])
            end = self.trace(body, body.computation.root.name, (index,))
            self._carried[key] = (
                end.frame is body and end.instruction.opcode == "parameter" and end.path == (index,)
            )
        return self._carried[key]

    def constant(self, frame: Frame, name: str, path: tuple[int, ...] = ()) -> np.ndarray | None:
        """The array that a value holds whenever it is read, or None where the module does not say.

        Its dtype and shape are those of the value. Raises DumpUnreadable for a constant that was
        printed without its elements.
        """
        end = self.trace(frame, name, path)
        i = end.instruction
        if end.path:
            return None
        if i.opcode == "constant":
            return read_literal(i)
        if i.opcode not in ("bitcast", "reshape", "broadcast", "convert"):
            return None
        value = self.constant(end.frame, i.operands[0])
        if value is None or i.shape.parts is not None:
            return None
        source = end.frame.computation.by_name[i.operands[0]].shape
        if i.opcode == "reshape":
            return value.reshape(i.shape.dims)
        if i.opcode == "bitcast":
            return _bitcast(value, source, i.shape)
        if i.opcode == "broadcast":
            axes = [int(axis) for axis in i.attributes["dimensions"].strip("{}").split(",") if axis]
            spread = [1] * len(i.shape.dims)
            for axis, size in zip(axes, value.shape, strict=True):
                spread[axis] = size
            return np.broadcast_to(value.reshape(spread), i.shape.dims)
        if value.dtype.kind in "iub" and i.shape.dtype[0] in "sup" and i.shape.dtype in _NUMPY:
            return value.astype(_NUMPY[i.shape.dtype])
        return None


def _same_array(i: Instruction, frame: Frame) -> bool:
    """Whether it is a bitcast or reshape that changes nothing."""
    if i.opcode not in ("bitcast", "reshape"):
        return False
    source = frame.computation.by_name[i.operands[0]].shape
    return (
        source.parts is None
        and (source.dtype, source.dims) == (i.shape.dtype, i.shape.dims)
        and (i.opcode == "reshape" or source.minor_to_major == i.shape.minor_to_major)
    )


def _bitcast(value: np.ndarray, source: Shape, target: Shape) -> np.ndarray | None:
    """Same bytes, other shape: the elements keep their order in memory, from major to minor."""
    if source.dtype != target.dtype or source.elements != target.elements:
        return None
    in_memory = value.transpose(source.minor_to_major[::-1]).reshape(-1)
    major_to_minor = target.minor_to_major[::-1]
    stored = in_memory.reshape([target.dims[axis] for axis in major_to_minor])
    return stored.transpose(np.argsort(major_to_minor)) if target.dims else stored.reshape(())


_NUMPY = {
    "pred": np.bool_, "s8": np.int8, "u8": np.uint8, "s16": np.int16, "u16": np.uint16,
    "s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16,
    "s4": ml_dtypes.int4, "u4": ml_dtypes.uint4, "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2, "f8e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
}  # fmt: skip


def read_literal(i: Instruction) -> np.ndarray | None:
    """The array of a `constant` instruction; None for a tuple, and for types no kernel reads."""
    shape = i.shape
    if shape.parts is not None or shape.dtype not in _NUMPY:
        return None
    dtype = np.dtype(_NUMPY[shape.dtype])
    if "..." in i.literal:
        raise DumpUnreadable(
            f"line {i.line} of the HLO text: the elements of %{i.name} are left out; "
            "print the module with print_large_constants=True"
        )
    text = _COMMENT.sub("", i.literal)  # /*i0=1*/ in front of rows
    words = text.replace("{", " ").replace("}", " ").replace(",", " ").split()
    if len(words) != shape.elements:
        raise DumpUnreadable(
            f"line {i.line} of the HLO text: %{i.name} has {len(words)} elements, its shape "
            f"{shape.dtype}{list(shape.dims)} has {shape.elements}"
        )
    try:
        if dtype == np.bool_:
            array = np.array([_BOOLEANS[word] for word in words], np.bool_)
        elif shape.dtype[0] in "su":
            array = _integers(words, dtype)
        else:
            array = np.array([float(word) for word in words], np.float64).astype(dtype)
    except (ValueError, KeyError, OverflowError) as error:
        raise DumpUnreadable(
            f"line {i.line} of the HLO text: the elements of %{i.name} are not all of type "
            f"{shape.dtype}: {error}"
        ) from error
    return array.reshape(shape.dims)


_COMMENT = re.compile(r"/\*.*?\*/")
_BOOLEANS = {"0": False, "1": True, "false": False, "true": True}


def _integers(words: list[str], dtype: np.dtype) -> np.ndarray:
    values = [int(word) for word in words]
    info = ml_dtypes.iinfo(dtype)
    if values and not (info.min <= min(values) and max(values) <= info.max):
        raise ValueError(f"out of range, from {min(values)} to {max(values)}")
    return np.array(values, np.uint64 if info.min == 0 else np.int64).astype(dtype)
