"""A peer with its block sizes chosen: a function and what its arguments look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

Call = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


@dataclass(frozen=True)
class Variant:
    """One way of asking a peer for the same result.

    `fn` and `args` are made when first asked for, and may raise what the library raises. Ask for
    them before any mesh is set: the libraries put a mask's tables on a device, which a mesh of
    devices that are not there does not have. Where the peer is known not to do this case,
    `refused` says why, and asking raises ValueError with it.
    """

    peer: str  # "splash"
    blocks: Mapping[str, Any]  # block sizes and switches by the peer's own names; JSON values
    source: str  # of the block sizes
    build: Callable[[], Call] = field(repr=False, compare=False)
    flags: tuple[str, ...] = ()  # of libtpu, beyond the defaults
    refused: str | None = None

    @property
    def name(self) -> str:
        """The peer and its choices: "splash block_q=512 block_kv=512"."""
        return " ".join([self.peer, *(f"{key}={value}" for key, value in self.blocks.items())])

    @property
    def fn(self) -> Callable[..., Any]:
        return self._call[0]

    @property
    def args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._call[1]

    @cached_property
    def _call(self) -> Call:
        if self.refused is not None:
            raise ValueError(f"{self.name} cannot be built: {self.refused}")
        return self.build()
