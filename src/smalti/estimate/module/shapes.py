"""Shapes as HLO text writes them: `bf16[512,512]{1,0:T(8,128)(2,1)S(1)}`, and tuples of them.

The grammar is that of XLA's `shape_util` and `layout` printers: after the colon stand tiles `T(…)`,
the size of an element in bits `E(4)` where it is packed, and the memory space `S(1)`.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

# Memory spaces of TPU modules; without S(…) a buffer lies in HBM. S(1) is VMEM, S(2) and S(8)
# sync flags, S(3) the CMEM of v4, S(6) SMEM; S(5), the host, is XLA's `Layout::kHostMemorySpace`.
HBM, VMEM, HOST = 0, 1, 5

BITS = {
    "pred": 8, "s1": 8, "u1": 8, "s2": 8, "u2": 8, "s4": 8, "u4": 8, "s8": 8, "u8": 8,
    "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 8, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8,
    "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
    "token": 0, "opaque": 0,
}  # fmt: skip

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=? ]*)\](?:\{([^{}]*)\})?\Z")
_LAYOUT = re.compile(r"([\d,]*)(?::((?:\([^()]*\)|[^:()])*))?\Z")
_LAYOUT_PART = re.compile(r"([A-Z#*]+)((?:\([^()]*\))+)")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Shape:
    """An array, or a tuple where `parts` is not None (then the other fields are empty)."""

    dtype: str = ""  # "bf16"
    dims: tuple[int, ...] = ()  # of a dynamic dimension, its bound
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    bits: int = 0  # of one element, as stored
    space: int = HBM
    parts: "tuple[Shape, ...] | None" = None

    @property
    def leaves(self) -> "tuple[Shape, ...]":
        """The arrays in it, in order."""
        if self.parts is None:
            return (self,)
        return tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def elements(self) -> int:
        """How many elements, without padding; of an array."""
        return math.prod(self.dims)

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory with the padding of its tiles, of all arrays in it: f32[4096,1] tiled
        (8,128) takes 128 times its elements."""
        if self.parts is not None:
            return sum(part.stored_bytes for part in self.parts)
        if not self.dims and not self.tiles:
            return -(-self.bits // 8)
        physical = [self.dims[axis] for axis in reversed(self.minor_to_major)]
        if self.tiles:
            tile = self.tiles[0]
            physical = [1] * (len(tile) - len(physical)) + physical
            lead = len(physical) - len(tile)
            for i, size in enumerate(tile):
                physical[lead + i] = -(-physical[lead + i] // size) * size
        return -(-math.prod(physical) * self.bits // 8)

    def stored_in(self, space: int | None) -> int:
        """Bytes, with padding, of the arrays in it that lie in a memory space; None: in any."""
        return sum(leaf.stored_bytes for leaf in self.leaves if space in (None, leaf.space))


@lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Raises ValueError, with the text that is not a shape."""
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        if not text.endswith(")"):
            raise ValueError(f"not a shape: {text[:120]!r}")
        return Shape(parts=tuple(parse_shape(part) for part in split_top(text[1:-1])))
    match = _ARRAY.match(text)
    if not match or match[1] not in BITS:
        raise ValueError(f"not a shape: {text[:120]!r}")
    dtype, dims_text, layout_text = match.groups()
    dims = tuple(_dim(part, text) for part in dims_text.split(",") if part.strip())
    minor_to_major = tuple(reversed(range(len(dims))))
    tiles, bits, space = (), BITS[dtype], HBM
    if layout_text:
        layout = _LAYOUT.match(layout_text)
        if not layout:
            raise ValueError(f"not a layout: {text[:120]!r}")
        if layout[1]:
            minor_to_major = tuple(int(axis) for axis in layout[1].split(","))
        if sorted(minor_to_major) != list(range(len(dims))):
            raise ValueError(f"a layout that does not fit its dimensions: {text[:120]!r}")
        tiles, bits, space = _layout_parts(layout[2] or "", bits, text)
    return Shape(dtype, dims, minor_to_major, tiles, bits, space)


def _dim(part: str, text: str) -> int:
    part = part.strip().removeprefix("<=")
    if not part.isdigit():
        raise ValueError(f"a dimension without a bound: {text[:120]!r}")
    return int(part)


def _layout_parts(parts: str, bits: int, text: str) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """Tiles, bits of an element and memory space, from what stands behind a layout's colon."""
    tiles, space, seen = (), HBM, 0
    for match in _LAYOUT_PART.finditer(parts):
        seen += len(match[0])
        values = match[2][1:-1].split(")(")
        if match[1] == "T":
            if not all(re.fullmatch(r"\d+(,\d+)*", value) for value in values):
                raise ValueError(f"a tile of unknown form: {text[:120]!r}")
            tiles = tuple(tuple(int(size) for size in value.split(",")) for value in values)
        elif match[1] == "E" and values[0].isdigit():
            bits = int(values[0])
        elif match[1] == "S" and values[0].isdigit():
            space = int(values[0])
        elif match[1] != "L":  # L(…): padding of the tail, in elements; it moves no bytes
            raise ValueError(f"a layout with an unknown part {match[1]!r}: {text[:120]!r}")
    if seen != len(parts):
        raise ValueError(f"not a layout: {text[:120]!r}")
    return tiles, bits, space


def split_top(text: str) -> list[str]:
    """Splits at the commas that stand in no bracket and no string.

    Raises ValueError where brackets or quotes do not match.
    """
    parts, start = [], 0
    for position in top_commas(text):
        parts.append(text[start:position].strip())
        start = position + 1
    parts.append(text[start:].strip())
    return parts if parts != [""] else []


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|["(){}\[\],]', re.DOTALL)
_CLOSES = {")": "(", "}": "{", "]": "["}


def top_commas(text: str, start: int = 0) -> list[int]:
    """Where the commas outside brackets and strings stand, from `start` on."""
    found, open_brackets = [], []
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token == ",":
            if not open_brackets:
                found.append(match.start())
        elif token in "({[":
            open_brackets.append(token)
        elif token in _CLOSES:
            if not open_brackets or open_brackets.pop() != _CLOSES[token]:
                raise ValueError(f"a {token!r} that closes nothing")
        elif token == '"':
            raise ValueError("a string that does not end")
    if open_brackets:
        raise ValueError(f"a {open_brackets[-1]!r} that is not closed")
    return found
