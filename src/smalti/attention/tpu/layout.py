"""How the arrays of a call are laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Heads:
    """The sizes of a call, and how its arrays are laid out.

    layout: "BHSD"; "BSHD", as ``[B, S, H·D]``, where heads are whole registers of lanes; or "BHDS",
    where they are not: XLA keeps such arrays with the tokens along lanes, so that none is wasted.
    """

    B: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    layout: Literal["BHSD", "BSHD", "BHDS"]

    @property
    def group(self) -> int:
        return self.Hq // self.Hkv

    @property
    def token_axis(self) -> int:
        """Of a block of an array, ``[tokens, dims]`` or ``[dims, tokens]``."""
        return 1 if self.layout == "BHDS" else 0

    def shape(self, heads: int, length: int, dim: int) -> tuple[int, ...]:
        if self.layout == "BSHD":
            return self.B, length, heads * dim
        return self.B, heads, *self.block(length, dim)

    def block(self, length: int, dim: int) -> tuple[int, int]:
        return (dim, length) if self.token_axis else (length, dim)

    def spec(self, length: int, dim: int, place) -> tuple[tuple, Callable]:
        """The block of ``length`` tokens of a head, and its index; place(at) → (head, block)."""

        def index(at):
            head, block = place(at)
            if self.layout == "BSHD":
                return at.b, block, head
            return at.b, head, *self.block(block, 0)

        if self.layout == "BSHD":
            return (None, length, dim), index
        return (None, None, *self.block(length, dim)), index


def take(ref, tokens, heads: Heads):
    """``tokens``, a slice, of a block: ``[tokens, dims]`` or ``[dims, tokens]``."""
    return ref[:, tokens] if heads.token_axis else ref[tokens, :]


def put(ref, tokens, value, heads: Heads, *, by_row: bool) -> None:
    """Write ``value``, ``[tokens, dims]`` if ``by_row`` else ``[dims, tokens]``, float32, to tokens
    of a block."""
    value = value.astype(ref.dtype)
    value = value.T if by_row == bool(heads.token_axis) else value
    if heads.token_axis:
        ref[:, tokens] = value
    else:
        ref[tokens, :] = value
