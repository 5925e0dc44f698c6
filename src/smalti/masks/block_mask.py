"""Which tiles a mask leaves alive: for each query tile, runs of key tiles.

A run is ``[start, stop)`` in key tiles, all whole (every pair visible, no mask needed) or all cut
(the mask decides by element). What is in no run is empty and is never touched. Runs are what every
kernel's walk is made of; they grow with the number of borders in a mask, not with Sq × Sk.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smalti.masks.mask_mod import Mask, TileStates, as_mask
from smalti.masks.tiles import TileGrid


class TileRuns(NamedTuple):
    """Runs of live tiles, row by row; a row's runs come in ascending order.

    NumPy where the mask is known at trace time, else traced. ``R`` is the most runs that a row has
    (traced: could have). Rows with fewer end in runs with ``start == stop``.
    """

    start: Any  # int32 [1 or B, 1 or H, rows, R], first tile
    stop: Any  # int32 like start, one past the last tile
    whole: Any  # bool like start: no mask needed inside


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask and the tiles that it leaves alive, for one shape and one tile size.

    Use it as ``mask=`` of `smalti.attention`; at other lengths than its own it raises, and, where
    the mask depends on them, at another batch size or number of heads. Made by `build_block_mask`.
    """

    is_block_mask = True

    mask: Mask  # bound to the sizes below
    q_runs: TileRuns  # per query tile, runs of key tiles
    grid: TileGrid = dataclasses.field(metadata={"static": True})

    @property
    def kv_runs(self) -> TileRuns:
        """The transpose: per key tile, runs of query tiles."""
        some, every = runs_to_states(self.q_runs, self.grid.num_kv)
        return states_to_runs(TileStates(some.swapaxes(-1, -2), every.swapaxes(-1, -2)))

    def states(self) -> TileStates:
        """Per tile, whether it is alive and whether it is whole: ``[1 or B, 1 or H, nq, nk]``."""
        return runs_to_states(self.q_runs, self.grid.num_kv)

    def __bool__(self):
        raise TypeError(
            "a BlockMask has no truth value: `and`, `or` and `not` cannot combine masks. Combine "
            "them with `&`, `|` and `~` first, then call build_block_mask."
        )

    def __repr__(self):
        grid = self.grid
        return (
            f"BlockMask({self.mask!r}, q_len={grid.q_len}, kv_len={grid.kv_len}, "
            f"block_q={grid.block_q}, block_kv={grid.block_kv})"
        )


def build_block_mask(
    mask_mod, batch: int, heads: int, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> BlockMask:
    """Find the live tiles of a mask.

    Args:
      mask_mod: a function ``mask_mod(b, h, q_idx, kv_idx)``, a mask of `smalti.masks`, or a boolean
        array that broadcasts to ``[batch, heads, q_len, kv_len]``.
      batch, heads: sizes of the call; ``heads`` counts query heads. Tiles are found once for all
        entries where the mask does not depend on them.
      q_len, kv_len: tokens.
      block_q, block_kv: tile size in tokens, at most the lengths, which need not be multiples.

    Catalogue masks and their combinations are classified in closed form; a general ``mask_mod`` is
    evaluated one row of tiles at a time.

    Raises:
      ValueError: a size below 1, or a mask that does not fit the sizes.
    """
    names = ("batch", "heads", "q_len", "kv_len", "block_q", "block_kv")
    sizes = (batch, heads, q_len, kv_len, block_q, block_kv)
    for name, size in zip(names, sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"{name}: got {size!r}; it must be an int of at least 1.")
    block_q, block_kv = min(block_q, q_len), min(block_kv, kv_len)
    grid = TileGrid(*(int(size) for size in (batch, heads, q_len, kv_len, block_q, block_kv)))
    mask = as_mask(mask_mod).bind(batch, heads, q_len, kv_len)
    return BlockMask(mask, states_to_runs(mask.classify(grid)), grid)


def states_to_runs(states: TileStates) -> TileRuns:
    """Join neighbouring tiles of equal state into runs."""
    known = isinstance(states.some, np.ndarray) and isinstance(states.every, np.ndarray)
    xp: Any = np if known else jnp
    some, every = xp.broadcast_arrays(states.some, states.every)
    state = xp.where(some, xp.where(every, 2, 1), 0).astype(np.int8)  # empty, cut, whole
    num = state.shape[-1]
    edge = xp.zeros((*state.shape[:-1], 1), np.int8)
    before = xp.concatenate([edge, state[..., :-1]], -1)
    after = xp.concatenate([state[..., 1:], edge], -1)
    begins, ends = (state > 0) & (state != before), (state > 0) & (state != after)
    most = int(begins.sum(-1).max()) if known else num
    most = max(most, 1)
    # Tiles that begin (end) a run, first; the others are pushed past them and become empty runs.
    place = xp.arange(num, dtype=np.int32)
    start = xp.sort(xp.where(begins, place, num), -1)[..., :most]
    stop = xp.sort(xp.where(ends, place + 1, num + 1), -1)[..., :most]
    stop = xp.where(start == num, num, stop)
    whole = xp.take_along_axis(state, xp.minimum(start, num - 1), -1) == 2
    return TileRuns(start.astype(np.int32), stop.astype(np.int32), whole & (start < num))


def runs_to_states(runs: TileRuns, num: int) -> TileStates:
    """The inverse of `states_to_runs`, over rows of ``num`` tiles."""
    xp = np if isinstance(runs.start, np.ndarray) else jnp
    place = xp.arange(num, dtype=np.int32)
    some = xp.zeros((*runs.start.shape[:-1], num), bool)
    every = some
    for i in range(runs.start.shape[-1]):
        inside = (place >= runs.start[..., i : i + 1]) & (place < runs.stop[..., i : i + 1])
        some, every = some | inside, every | (inside & runs.whole[..., i : i + 1])
    return TileStates(some, every)
