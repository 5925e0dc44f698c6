"""Tile sizes that a caller may set."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How much of the score matrix one step computes.

    Args:
      block_q: queries of a step, at least 1.
      block_kv: keys of a step, at least 1. `blockwise` leaves dead keys out by tiles of 128 where
        this is a multiple of 128, else by tiles of this size.

    The TPU kernels take multiples of 128, since both sizes of a tile lie along lanes: up to 512
    queries and 1024 keys.

    Results depend on them only by rounding. A size larger than the sequence is cut down to it.
    """

    block_q: int
    block_kv: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            is_int = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
            if not is_int or size < 1:
                raise ValueError(
                    f"BlockSizes.{field.name}: got {size!r}; it must be an int of at least 1, "
                    "best a multiple of 128."
                )
            object.__setattr__(self, field.name, int(size))
