"""Reads the text of a scheduled HLO module, as `compiled.as_text()` prints it.

The grammar is that of XLA's HLO printer: computations, one instruction a line in schedule order,
the entry last. A `kernel_metadata` attribute may hold line breaks. Whatever cannot be read raises
DumpUnreadable with its line: a module that was cut or damaged never gives a number.
"""

import itertools
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.module.shapes import Shape, parse_shape, split_top, top_commas


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. Names have no `%`."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    literal: str  # what the brackets of a constant or parameter hold; else ""
    attributes: dict[str, str]  # as text, without backend_config
    backend: dict[str, Any]  # backend_config
    line: int  # in the text, from 1

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations it names, in the order printed: body, condition, calls, branches …"""
        names = []
        for key, value in self.attributes.items():
            if key in _CALLS:
                names += [name.strip().lstrip("%") for name in value.strip("{}").split(",")]
        return tuple(names)

    def calls(self, key: str) -> str | None:
        """The computation an attribute such as `body` names, or None without that attribute."""
        value = self.attributes.get(key)
        return None if value is None else value.lstrip("%")

    @cached_property
    def op_name(self) -> str:
        """The path of jax operations it came from, or ""."""
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        return match[1].replace('\\"', '"') if match else ""

    @cached_property
    def target(self) -> str:
        """Of a custom call, its target; else ""."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @cached_property
    def cycles(self) -> int | None:
        """The compiler's `estimated_cycles`, which it writes into `window_config` only.

        None where it writes none, or the largest 64-bit number, its word for "no estimate".
        """
        value = self.backend.get("window_config", {}).get("estimated_cycles")
        if value is None:
            return None
        try:
            cycles = int(value)
        except (TypeError, ValueError):
            cycles = -1
        if cycles < 0:
            raise DumpUnreadable(
                f"line {self.line} of the HLO text: %{self.name} has estimated_cycles {value!r}, "
                "which is no number of cycles"
            )
        return None if cycles == _NO_ESTIMATE else cycles


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in schedule order."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction
    by_name: dict[str, Instruction]
    parameters: dict[int, Instruction]


@dataclass(frozen=True, eq=False)
class Module:
    """A scheduled module. Names of computations have no `%`."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, int]] = field(repr=False)  # stack_frame_id: innermost file, line

    def source(self, instruction: Instruction) -> tuple[str, int] | None:
        """File and line of the user's code it came from, or None where the compiler says none."""
        metadata = instruction.attributes.get("metadata", "")
        frame = _FRAME.search(metadata)
        if frame:
            return self.frames.get(int(frame[1]))
        file, line = _SOURCE_FILE.search(metadata), _SOURCE_LINE.search(metadata)
        return (file[1], int(line[1])) if file and line else None

    def of_opcode(self, opcode: str) -> list[Instruction]:
        """All instructions of one opcode, in the order of the text."""
        return [
            instruction
            for computation in self.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == opcode
        ]


_NO_ESTIMATE = 2**63 - 1
_CALLS = (
    "calls", "to_apply", "body", "condition", "branch_computations", "true_computation",
    "false_computation", "called_computations", "select", "scatter", "async_computation",
)  # fmt: skip
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE_FILE = re.compile(r'source_file="([^"]*)"')
_SOURCE_LINE = re.compile(r"source_line=(\d+)")

_HEADER = re.compile(r"(ENTRY )?%?(\S+) \((.*)\) -> .*\{$")
_END = re.compile(r'\}(?:, execution_thread="[^"]*")?$')
_START = re.compile(r"  (ROOT )?%?([^\s=(){},\"]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ATTRIBUTE = re.compile(r",? ?([A-Za-z_][\w.\-]*)=")
_COMMENT = re.compile(r"/\*.*?\*/")
_JSON = json.JSONDecoder()
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def read_module(text: str) -> Module:
    """The module in `Program.hlo`.

    Raises DumpUnreadable, naming the line, for text that is cut, damaged, not scheduled, or of a
    format that this version does not know.
    """
    lines = text.split("\n")
    header = re.match(r"HloModule ([^\s,]+)", lines[0])
    if not header:
        raise _unreadable(1, f"a module begins with 'HloModule', this with {lines[0][:60]!r}")
    if "is_scheduled=true" not in lines[0]:
        raise _unreadable(1, "the module is not scheduled: give the compiled one's text")
    tables, at = _read_tables(lines)
    computations: dict[str, Computation] = {}
    entry = None
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
            continue
        head = _HEADER.match(line)
        if not head:
            raise _unreadable(at + 1, f"expected a computation, got {line[:80]!r}")
        if entry is not None:
            raise _unreadable(at + 1, "a computation after the entry")
        computation, at = _read_computation(lines, at, head[2], head[3])
        if computation.name in computations:
            raise _unreadable(at, f"computation %{computation.name} stands there twice")
        computations[computation.name] = computation
        entry = computation if head[1] else None
    if entry is None:
        raise _unreadable(len(lines), "the text ends before the ENTRY computation: it is cut short")
    for computation in computations.values():
        for instruction in computation.instructions:
            for name in instruction.called:
                if name not in computations:
                    raise _unreadable(
                        instruction.line, f"%{instruction.name} calls %{name}, which is not there"
                    )
    return Module(header[1], computations, entry, _innermost(tables))


def scoped_vmem_bytes(module: Module) -> dict[str, int]:
    """VMEM that the compiler says an operation uses for itself, by name."""
    found = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for used in instruction.backend.get("used_scoped_memory_configs") or ():
                if used.get("memory_space") == _VMEM_SPACE:
                    found[instruction.name] = int(used["size"])
    return found


def _unreadable(line: int, what: str) -> DumpUnreadable:
    return DumpUnreadable(f"line {line} of the HLO text: {what}")


def _read_tables(lines: list[str]) -> tuple[dict[str, dict[int, str]], int]:
    """The tables of source lines behind the header, and the index of the first line after."""
    tables: dict[str, dict[int, str]] = {}
    at, table = 1, None
    while at < len(lines):
        line = lines[at]
        if line in _TABLES:
            table = tables.setdefault(line, {})
        elif line and table is not None and line[0].isdigit():
            number, _, rest = line.partition(" ")
            if not number.isdigit():
                raise _unreadable(at + 1, f"expected a row of a source table, got {line[:80]!r}")
            table[int(number)] = rest
        elif line:
            break
        at += 1
    return tables, at


def _innermost(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, int]]:
    places = {}
    for number, row in tables.get("FileLocations", {}).items():
        match = re.match(r"\{file_name_id=(\d+) .*?\bline=(\d+)", row)
        name = tables.get("FileNames", {}).get(int(match[1])) if match else None
        if match and name is not None:
            places[number] = (name.strip('"'), int(match[2]))
    frames = {}
    for number, row in tables.get("StackFrames", {}).items():
        match = re.match(r"\{file_location_id=(\d+)", row)
        if match and int(match[1]) in places:
            frames[number] = places[int(match[1])]
    return frames


def _read_computation(
    lines: list[str], at: int, name: str, parameters_text: str
) -> tuple[Computation, int]:
    """The computation whose header is line `at`, and the index of the line after its end."""
    head = at
    instructions: list[Instruction] = []
    by_name: dict[str, Instruction] = {}
    root = None
    at += 1
    while True:
        if at >= len(lines):
            raise _unreadable(len(lines), f"the text ends inside %{name}: it is cut short")
        if _END.match(lines[at]):
            break
        first = at
        start = _START.match(lines[at])
        if not start:
            raise _unreadable(at + 1, f"expected an instruction, got {lines[at][:80]!r}")
        at += 1
        # An instruction goes on until the next begins: kernel_metadata holds line breaks.
        while at < len(lines) and not _START.match(lines[at]) and not _END.match(lines[at]):
            at += 1
        statement = lines[first] if at == first + 1 else "\n".join(lines[first:at])
        try:
            instruction = _read_instruction(statement, start, first + 1)
        except (ValueError, IndexError) as error:
            raise _unreadable(first + 1, f"%{start[2]}: {error}") from error
        for operand in instruction.operands:
            if operand not in by_name:
                raise _unreadable(
                    first + 1, f"%{instruction.name} uses %{operand}, which does not stand above it"
                )
        if instruction.name in by_name:
            raise _unreadable(first + 1, f"%{instruction.name} stands there twice")
        by_name[instruction.name] = instruction
        instructions.append(instruction)
        if start[1]:
            if root is not None:
                raise _unreadable(first + 1, f"%{name} has a second ROOT")
            root = instruction
    if root is None:
        raise _unreadable(head + 1, f"%{name} has no ROOT")
    parameters = {int(i.literal): i for i in instructions if i.opcode == "parameter"}
    try:
        declared = len(split_top(parameters_text))
    except ValueError as error:
        raise _unreadable(head + 1, f"the parameters of %{name}: {error}") from error
    if sorted(parameters) != list(range(declared)):
        raise _unreadable(
            head + 1,
            f"%{name} declares {declared} parameters, and has instructions for "
            f"{sorted(parameters)}",
        )
    return Computation(name, tuple(instructions), root, by_name, parameters), at + 1


def _read_instruction(text: str, start: re.Match[str], line: int) -> Instruction:
    """Raises ValueError saying what is wrong with it."""
    shape_at = start.end()
    if text.startswith("(", shape_at):
        shape_end = _closing(text, shape_at)
    else:
        shape_end = text.find(" ", shape_at)
    opcode = _OPCODE.match(text, shape_end) if shape_end > 0 else None
    if not opcode:
        raise ValueError("expected a shape and an opcode")
    shape = parse_shape(text[shape_at:shape_end])
    end = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : end - 1]
    literal, operands = "", ()
    if opcode[1] == "constant":
        literal = inside
    elif opcode[1] == "parameter":
        if not inside.isdigit():
            raise ValueError(f"a parameter's number is {inside[:40]!r}")
        literal = inside
    else:
        operands = _read_operands(inside)
    attributes, backend = _read_attributes(text, end)
    return Instruction(start[2], opcode[1], shape, operands, literal, attributes, backend, line)


_BRACKET = re.compile(r"[()]")
_VMEM_SPACE = "1"  # of XLA's numbers of memory spaces


def _closing(text: str, at: int) -> int:
    """Behind the round bracket that closes the one at `at`. No strings may stand between."""
    depth = 0
    for match in _BRACKET.finditer(text, at):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError("a '(' that is not closed")


def _read_operands(inside: str) -> tuple[str, ...]:
    if "/*" in inside:
        inside = _COMMENT.sub("", inside)
    if not inside.strip():
        return ()
    parts = split_top(inside) if "[" in inside or "(" in inside else inside.split(",")
    # An operand may be printed with its shape in front.
    names = tuple(part.split()[-1].lstrip("%") if part.strip() else "" for part in parts)
    if not all(names):
        raise ValueError(f"an operand is missing in ({inside[:80]})")
    return names


def _read_attributes(text: str, at: int) -> tuple[dict[str, str], dict[str, Any]]:
    attributes: dict[str, str] = {}
    backend: dict[str, Any] = {}
    tail = text[at:].rstrip()
    config_at = tail.find(", backend_config={")
    if config_at >= 0:
        backend, end = _JSON.raw_decode(tail, config_at + len(", backend_config="))
        tail = tail[:config_at] + tail[end:]
    if not tail:
        return attributes, backend
    if not tail.startswith(", "):
        raise ValueError(f"expected attributes, got {tail[:60]!r}")
    commas = [*top_commas(tail), len(tail)]
    for start, end in itertools.pairwise(commas):
        match = _ATTRIBUTE.match(tail, start, end)
        if not match:
            raise ValueError(f"expected an attribute, got {tail[start:end][:60]!r}")
        attributes[match[1]] = tail[match.end() : end]
    return attributes, backend
