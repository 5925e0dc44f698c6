"""How much of the score matrix a mask leaves: by tile, as a kernel computes it, and by pair."""

from __future__ import annotations

import dataclasses

import numpy as np

from smalti.masks.block_mask import BlockMask
from smalti.masks.runs import TileRuns, live_runs, runs_by_rows
from smalti.masks.tiles import TileGrid, is_known


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one batch entry and query head. A pair is a query and a key."""

    whole: int  # tiles
    cut: int  # tiles
    empty: int  # tiles
    pairs_visible: int
    pairs_live: int  # in live tiles, which a kernel computes
    pairs: int  # Sq · Sk

    @property
    def live(self) -> int:
        return self.whole + self.cut

    @property
    def saved(self) -> float:
        """Share of dense attention's FLOPs that empty tiles leave out.

        The products Q·Kᵀ and P·V take 2·D and 2·Dv FLOPs a pair, so it is the share of the pairs,
        for any D; likewise for the backward's five.
        """
        return 1 - self.pairs_live / self.pairs

    @property
    def saved_by_pair(self) -> float:
        """What would be left out if tiles were single pairs."""
        return 1 - self.pairs_visible / self.pairs


def count(block_mask: BlockMask, batch: int = 0, head: int = 0) -> Counts:
    """Count tiles from their runs, and pairs exactly, with no array of either.

    A general ``mask_mod`` is evaluated at each of its Sq · Sk pairs. Raises ValueError for an entry
    that there is not, and for traced arrays.
    """
    batch, head = entry(block_mask, batch, head)
    grid = block_mask.grid
    _, start, stop, whole = live_runs(block_mask.q_runs, batch, head)
    tiles = (stop - start).astype(np.int64)
    return Counts(
        whole=int(tiles[whole].sum()),
        cut=int(tiles[~whole].sum()),
        empty=grid.num_q * grid.num_kv - int(tiles.sum()),
        pairs_visible=_visible(block_mask, batch, head),
        pairs_live=pairs_of(block_mask.q_runs, grid, batch, head),
        pairs=grid.q_len * grid.kv_len,
    )


def pairs_of(runs: TileRuns, grid: TileGrid, batch: int = 0, head: int = 0) -> int:
    """Pairs in the tiles of known runs; what sticks out of the score matrix is none."""
    row, start, stop, _ = (x.astype(np.int64) for x in live_runs(runs, batch, head))
    heights = np.minimum((row + 1) * grid.block_q, grid.q_len) - row * grid.block_q
    widths = np.minimum(stop * grid.block_kv, grid.kv_len) - start * grid.block_kv
    return int((heights * widths).sum())


def entry(block_mask: BlockMask, batch: int, head: int) -> tuple[int, int]:
    """Where the runs of that batch entry and head are: at 0 if all of them share theirs."""
    if not isinstance(block_mask, BlockMask):
        raise ValueError(
            f"block_mask: got {block_mask!r} of type {type(block_mask).__name__}; it must be a "
            "BlockMask. Make one of a mask: build_block_mask(mask, batch, heads, q_len, kv_len, "
            "block_q, block_kv)."
        )
    if not is_known(block_mask):
        raise ValueError(
            "block_mask: its arrays are traced, so its tiles are not known yet. Show it outside of "
            "jit, or return it from there first."
        )
    grid = block_mask.grid
    for name, index, size in (("batch", batch, grid.batch), ("head", head, grid.heads)):
        is_int = isinstance(index, (int, np.integer)) and not isinstance(index, bool)
        if not is_int or not 0 <= index < size:
            raise ValueError(f"{name}: got {index!r}; there are {size}, from 0.")
    batches, heads = block_mask.q_runs.start.shape[:2]
    return batch if batches > 1 else 0, head if heads > 1 else 0


def _visible(block_mask: BlockMask, batch: int, head: int) -> int:
    """Pairs are tiles of one query and one key: whole or empty, so classified exactly."""
    grid = block_mask.grid
    single = TileGrid(grid.batch, grid.heads, grid.q_len, grid.kv_len, 1, 1)
    found = 0
    for _, runs in runs_by_rows(block_mask.mask, single):
        batches, heads = runs.start.shape[:2]
        at = batch if batches > 1 else 0, head if heads > 1 else 0
        found += int((runs.stop[at].astype(np.int64) - runs.start[at])[runs.whole[at]].sum())
    return found
