"""Reads libtpu's `*-final_bundles.txt`: the VLIW bundles of one op, in order of their addresses.

A bundle is written `0xADDR [LB|LH|LE|PB|PF|CT]: > { op ;; op ;; … }`, one `>` for every loop around
it. Comments may nest, span lines and hold anything; two kinds of them carry facts: `Start region N`
and `End region N` name the targets of branches, and `loc("file.py":line:col)` the source of an op.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from smalti.estimate.errors import DumpUnreadable


@dataclass(frozen=True, slots=True)
class Operation:
    """One slot of a bundle."""

    opcode: str  # "sadd.s32"
    destination: str | None  # "%s37_s25"; None for `%12 = …`, which names an effect
    predicate: str | None  # "%p38_p0" or "!%p38_p0": the op takes place where it holds
    arguments: tuple[str, ...]
    source: tuple[str, int] | None  # file and line
    note: str  # what comments say of it, between " :: ": "core id"
    text: str

    @property
    def is_core_id(self) -> bool:
        """Reads which of the cores that share the kernel this is."""
        return self.opcode == "sld" and "core id" in self.note.split(" :: ")

    @property
    def is_vector(self) -> bool:
        """Works on vector registers alone: it takes slots, and decides nothing."""
        return _is_vector(self.opcode, self.destination)


_SCALAR_WITH_V = ("vsync", "vwait", "vpush", "vtrace", "vsettm", "vset.", "vsetiar")
_SCALAR_WITH_V += ("vdelay",)
_SCALAR_REGISTER = re.compile(r"%[a-z]+\d+_[sp]\d+")


def _is_vector(opcode: str, destination: str | None) -> bool:
    # What writes a scalar register is no vector operation, whatever its name.
    return (
        opcode.startswith("v")
        and not opcode.startswith(_SCALAR_WITH_V)
        and not (destination and _SCALAR_REGISTER.search(destination))
    )


@dataclass(frozen=True, slots=True)
class Bundle:
    address: int
    depth: int  # how many loops are around it
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Listing:
    """One op's bundles; `regions[N]` is the address at which region N starts."""

    op: str
    bundles: tuple[Bundle, ...]
    regions: dict[int, int]
    boundaries: frozenset[int]  # addresses at which some region starts, or after which one ends
    ends: dict[int, tuple[int, ...]]  # the regions that end with a bundle, by its address
    spaces: dict[str, str]  # the memory that a pointer's SSA name points into

    @cached_property
    def starts(self) -> frozenset[int]:
        """Addresses at which a region starts."""
        return frozenset(self.regions.values())

    def ended_at(self, address: int) -> tuple[int, ...]:
        return self.ends.get(address, ())

    def address_of(self, target: str, branch: int) -> int:
        """The address of a branch's target, written `$region12`; `branch` is its own.

        A branch over all that is left of a kernel goes to an empty region, which the dump leaves
        out: to where the region before it ends, which is the kernel's end but for its exit bundle.
        """
        number = int(match[1]) if (match := _TARGET.fullmatch(target)) else -1
        if number in self.regions:
            return self.regions[number]
        last = len(self.bundles) - 1
        for end in (last, last - 1):
            if number - 1 in self.ended_at(end) and self.regions.get(number - 1, last) > branch:
                return end + 1
        raise DumpUnreadable(
            f"{self.op}: a branch goes to {target!r}, which the dump does not hold; "
            "it is damaged, or of a libtpu whose format is not known"
        )


_POINTERS = ("int_to_ptr.", "scalar_lea.", "inlined_call_operand.")
_BUNDLE = re.compile(
    r"^[ \t]*(?P<address>0x[0-9a-f]+|0)[ \t]+(?:[A-Z]{2})?[ \t]*:[ \t]*(?P<loops>>*)[ \t]*\{",
    re.MULTILINE,
)
_COMMENT_MARK = re.compile(r"/\*|\*/")
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_LOCATION = re.compile(r'loc\("([^"]*)":(\d+)')
_TARGET = re.compile(r"\$region(\d{1,9})")
_EXIT = re.compile(r"exit bundle:")
_OPERATION = re.compile(
    r"(?:(?P<destination>%[A-Za-z_]*\d*\w*(?:,\s*%\w+)*)\s*=\s*)?"
    r"(?P<opcode>[A-Za-z_][\w.<>-]*)\s*(?P<rest>.*)",
    re.DOTALL,
)
_PREDICATE = re.compile(r"^\(\s*(!?%\w+)\s*\)\s*,?\s*")
_PREDICATE_BEHIND = re.compile(r"\s\(\s*(!?%\w+)\s*\)$")
_STORE = re.compile(r"(\[.*\])\s*(?:\(\s*(!?%\w+)\s*\)\s*,)?\s*(\S+)")


def parse_listing(text: str, op: str) -> Listing:
    """Reads a bundles file; `op` names it in errors.

    Raises DumpUnreadable where the text is cut short or damaged.
    """
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise DumpUnreadable(f"{op}: no bundle in the dump of {len(text)} characters")
    if not _EXIT.search(text, starts[-1].start()):
        raise DumpUnreadable(f"{op}: the dump ends before its exit bundle; it is cut short")
    bundles = []
    regions: dict[int, int] = {}
    boundaries = set()
    spaces = {}
    ends: dict[int, tuple[int, ...]] = {}
    for number, start in enumerate(starts):
        address = int(start["address"], 16)
        if address != number:
            raise DumpUnreadable(
                f"{op}: bundle {address:#x} stands where {number:#x} was due; lines are missing"
            )
        end = starts[number + 1].start() if number + 1 < len(starts) else len(text)
        body, comments = _without_comments(text[start.end() : end], op, address)
        close = body.rfind("}")
        if close < 0:
            raise DumpUnreadable(f"{op}: bundle {address:#x} does not end; the dump is damaged")
        operations = []
        for part in body[:close].split(";;"):
            if part := part.strip():
                operation = _operation(part, comments, op, address)
                operations.append(operation)
                if operation.opcode.startswith(_POINTERS):
                    spaces[operation.destination] = operation.opcode.partition(".")[2]
        for kind, region in _REGION.findall("".join(comments)):
            if kind != "End":
                if regions.setdefault(int(region), address) != address:
                    raise DumpUnreadable(
                        f"{op}: region {region} starts twice, at {regions[int(region)]:#x} and "
                        f"{address:#x}; the dump is damaged"
                    )
                boundaries.add(address)
            else:
                boundaries.add(address + 1)
                ends[address] = (*ends.get(address, ()), int(region))
        bundles.append(Bundle(address, len(start["loops"]), tuple(operations)))
    return Listing(op, tuple(bundles), regions, frozenset(boundaries), ends, spaces)


def _without_comments(text: str, op: str, address: int) -> tuple[str, list[str]]:
    """The text with `\x00k\x00` for its k-th outermost comment, and those comments."""
    parts, comments = [], []
    depth, after = 0, 0
    for mark in _COMMENT_MARK.finditer(text):
        if mark.group() == "/*":
            if depth == 0:
                parts.append(text[after : mark.start()])
                after = mark.end()
            depth += 1
        else:
            depth -= 1
            if depth < 0:
                raise DumpUnreadable(f"{op}: bundle {address:#x} ends a comment that never began")
            if depth == 0:
                parts.append(f"\x00{len(comments)}\x00")
                comments.append(text[after : mark.start()])
                after = mark.end()
    if depth:
        raise DumpUnreadable(f"{op}: a comment in bundle {address:#x} does not end")
    parts.append(text[after:])
    return "".join(parts), comments


_HELD = re.compile("\x00(\\d+)\x00")


def _operation(text: str, comments: list[str], op: str, address: int) -> Operation:
    source, notes = None, []
    for held in _HELD.findall(text):
        for part in comments[int(held)].split(" :: "):
            if location := _LOCATION.search(part):
                source = (location[1], int(location[2]))
            else:
                notes.append(part.strip())
    note = " :: ".join(notes)
    text = " ".join(_HELD.sub(" ", text).split())
    match = _OPERATION.fullmatch(text)
    if match is None:
        raise DumpUnreadable(f"{op}: bundle {address:#x} holds what is no operation: {text!r}")
    destination, opcode, rest = match["destination"], match["opcode"], match["rest"]
    if destination is not None and re.fullmatch(r"%\d+", destination):
        destination = None
    predicate = None
    if _is_vector(opcode, destination):
        return Operation(opcode, destination, None, (), source, note, text)
    rest = re.sub(r"\[(thread|resolvable):\S+\]", "", rest).strip()
    if opcode == "sst" and (store := _STORE.fullmatch(rest)):
        return Operation(opcode, None, store[2], (store[1], store[3]), source, note, text)
    arguments = []
    for argument in _split(rest):
        # A predicate stands first, or after the address of a load.
        if found := _PREDICATE.match(argument):
            predicate = found[1]
            argument = argument[found.end() :]
        elif found := _PREDICATE_BEHIND.search(argument):
            predicate = found[1]
            argument = argument[: found.start()]
        if argument := argument.strip():
            arguments.append(argument)
    return Operation(opcode, destination, predicate, tuple(arguments), source, note, text)


def _split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    parts.append(text[begin:].strip())
    return parts
