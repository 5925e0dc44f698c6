"""The walk of `blockwise`: which tiles each row of the scan visits, gathered into chunks.

A row is one group of batch entries and key heads times one tile of queries. A chunk is up to ``n``
live key tiles, neighbours or not, whose keys are gathered so that one matrix product covers them
all: a window, its sink tokens and a ragged border become one product, and an online softmax is
needed only between chunks. Whole tiles come first, so that as few chunks as possible are cut.

Why these sizes: see docs/performance/cpu.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smalti.attention.block_sizes import BlockSizes
from smalti.masks import BlockMask, Mask
from smalti.masks.mask_mod import TileStates
from smalti.masks.tiles import TileGrid, reduce_tiles

KV_TILE = 128  # keys; the grain at which dead keys are left out
# Queries of a row, and how fast products of that height are, against those of 256.
RATES = {128: 0.87, 256: 1.0, 512: 1.08}
UNKNOWN_BLOCK_Q = 256  # a traced mask: its rows may turn out short or long
CHUNK = 512  # keys of a chunk in long rows
SHORT_ROW = 256 * 768  # pairs; a row that sees no more is one chunk, without an online softmax
SCORES_BYTES = 4 << 20  # scores of one step that the caches of a CPU still hold


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """Rows and chunks; NumPy where the mask is known at trace time."""

    row_batch: Any  # int32 [rows], first batch entry of the row's group
    row_head: Any  # int32 [rows], first key head
    row_q: Any  # int32 [rows], query tile
    row_start: Any  # int32 [rows], first chunk
    row_stop: Any  # int32 [rows], one past the last chunk
    tiles: Any  # int32 [chunks, n], key tiles; a chunk of fewer is filled with num_kv, past the end
    whole: Any  # bool [chunks], no mask needed
    grid: TileGrid = dataclasses.field(metadata={"static": True})
    num_b: int = dataclasses.field(metadata={"static": True})  # batch entries in a group
    num_h: int = dataclasses.field(metadata={"static": True})  # key heads in a group
    some_whole: bool = dataclasses.field(metadata={"static": True})
    some_cut: bool = dataclasses.field(metadata={"static": True})

    @property
    def chunk_tiles(self) -> int:
        return self.tiles.shape[1]


def plan(
    mask: Mask | BlockMask,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    block_sizes: BlockSizes | None,
) -> Walk:
    """Choose tile sizes and lay out the walk. ``mask`` is bound to the sizes."""

    def states_at(block_q: int, block_kv: int) -> tuple[TileGrid, TileStates]:
        grid = TileGrid(batch, heads, q_len, kv_len, min(block_q, q_len), min(block_kv, kv_len))
        if isinstance(mask, BlockMask):
            grid, states = _at_grid(mask, grid)
        else:
            states = mask.classify(grid)
        xp = np if isinstance(states.some, np.ndarray) else jnp
        some, every = xp.broadcast_arrays(states.some, states.every)
        return grid, _ragged_are_cut(_per_kv_head(TileStates(some, every), kv_heads), grid)

    if block_sizes is not None:
        tile = KV_TILE if block_sizes.block_kv % KV_TILE == 0 else block_sizes.block_kv
        grid, states = states_at(block_sizes.block_q, tile)
        chunk = block_sizes.block_kv
    else:
        choices = {block_q: states_at(block_q, KV_TILE) for block_q in RATES}
        grid, states = choices[UNKNOWN_BLOCK_Q]
        chunk = CHUNK
        if isinstance(states.some, np.ndarray):
            grid, states = min(choices.values(), key=lambda choice: _cost(*choice))
            chunk = _chunk(grid, states)
    n = min(max(chunk // grid.block_kv, 1), grid.num_kv)
    return _lay_out(states, grid, n, heads // kv_heads, kv_heads)


def _chunk(grid: TileGrid, states: TileStates) -> int:
    """Keys of a chunk: the longest row in one, if that is not too much."""
    longest = int(states.some.sum(-1).max()) * grid.block_kv
    return longest if grid.block_q * longest <= SHORT_ROW else CHUNK


def _cost(grid: TileGrid, states: TileStates) -> float:
    """Relative time of a walk: the pairs that it computes over the rate at this tile height."""
    n = max(_chunk(grid, states) // grid.block_kv, 1)
    chunks = -(-states.some.sum(-1) // n)
    # A height of its own: cut down to q_len, or a BlockMask's.
    rate = RATES.get(grid.block_q, min(RATES.values()))
    return chunks.mean() * grid.num_q * grid.block_q * n * grid.block_kv / rate


def _lay_out(states: TileStates, grid: TileGrid, n: int, group: int, kv_heads: int) -> Walk:
    known = isinstance(states.some, np.ndarray)
    xp = np if known else jnp
    some, every = states
    masks_b, masks_h, num_q, num_kv = some.shape
    # Per row: live tiles, whole ones first, in chunks of n.
    order = xp.argsort(xp.where(every, 0, xp.where(some, 1, 2)), axis=-1, stable=True)
    live, whole = some.sum(-1), every.sum(-1)
    per_row = -(-num_kv // n)
    order = xp.pad(order, [(0, 0)] * 3 + [(0, per_row * n - num_kv)])
    tiles = order.reshape(masks_b, masks_h, num_q, per_row, n)
    first = np.arange(per_row)[None, None, None, :] * n  # a chunk's place among its row's tiles
    num_tiles = xp.clip(live[..., None] - first, 0, n)
    counts = np.arange(n)[None, None, None, None, :] < num_tiles[..., None]
    tiles = xp.where(counts, tiles, num_kv)
    is_whole = (first + n <= whole[..., None]) & (num_tiles == n)

    num_b = 1 if masks_b > 1 else grid.batch
    num_h = 1 if masks_h > 1 else kv_heads
    step_bytes = group * grid.block_q * n * grid.block_kv * 4
    num_b = _largest_divisor(num_b, SCORES_BYTES // (step_bytes * num_h))
    num_h = _largest_divisor(num_h, SCORES_BYTES // (step_bytes * num_b))

    b, h, i = np.indices((grid.batch // num_b, kv_heads // num_h, num_q)).reshape(3, -1)
    b, h = b * num_b, h * num_h
    mask_row = np.ravel_multi_index((b % masks_b, h % masks_h, i), (masks_b, masks_h, num_q))
    chunks = xp.minimum(-(-live // n), per_row).reshape(-1)
    start = np.arange(masks_b * masks_h * num_q) * per_row
    tiles, num_tiles, is_whole = tiles.reshape(-1, n), num_tiles.reshape(-1), is_whole.reshape(-1)
    if known:  # leave the empty chunks out
        start = np.cumsum(chunks) - chunks
        keep = num_tiles > 0 if num_tiles.any() else np.arange(num_tiles.size) < 1
        tiles, num_tiles, is_whole = tiles[keep], num_tiles[keep], is_whole[keep]
    return Walk(
        row_batch=b.astype(np.int32),
        row_head=h.astype(np.int32),
        row_q=i.astype(np.int32),
        row_start=start[mask_row].astype(np.int32),
        row_stop=(start + chunks)[mask_row].astype(np.int32),
        tiles=tiles.astype(np.int32),
        whole=is_whole,
        grid=grid,
        num_b=num_b,
        num_h=num_h,
        some_whole=bool(is_whole.any()) if known else True,
        some_cut=not bool(is_whole.all()) if known else True,
    )


def _per_kv_head(states: TileStates, kv_heads: int) -> TileStates:
    """A group of query heads visits a key tile together: alive if any sees it, whole if all do."""
    batch, heads, num_q, num_kv = states.some.shape
    if heads == 1:
        return states
    shape = (batch, kv_heads, heads // kv_heads, num_q, num_kv)
    return TileStates(states.some.reshape(shape).any(2), states.every.reshape(shape).all(2))


def _ragged_are_cut(states: TileStates, grid: TileGrid) -> TileStates:
    """Tiles that stick out of the score matrix need the mask: what sticks out is not there."""
    fits_q = np.arange(1, grid.num_q + 1) * grid.block_q <= grid.q_len
    fits_kv = np.arange(1, grid.num_kv + 1) * grid.block_kv <= grid.kv_len
    return TileStates(
        states.some, states.every & states.some & (fits_q[:, None] & fits_kv)[None, None]
    )


def _at_grid(block_mask: BlockMask, grid: TileGrid) -> tuple[TileGrid, TileStates]:
    """The states of a BlockMask at our tile sizes: tiles joined or split; where neither fits, the
    BlockMask's own size is kept."""
    own = block_mask.grid
    some, every = block_mask.states()
    block_q, block_kv = own.block_q, own.block_kv
    join_q = grid.block_q // block_q if grid.block_q % block_q == 0 else 1
    join_kv = grid.block_kv // block_kv if grid.block_kv % block_kv == 0 else 1
    some = reduce_tiles(some, join_q, join_kv, every=False)
    every = reduce_tiles(every, join_q, join_kv, every=True)
    block_q, block_kv = block_q * join_q, block_kv * join_kv
    if block_kv % grid.block_kv == 0:
        split, num_kv = block_kv // grid.block_kv, -(-own.kv_len // grid.block_kv)
        some, every = (x.repeat(split, axis=-1)[..., :num_kv] for x in (some, every))
        block_kv = grid.block_kv
    return dataclasses.replace(grid, block_q=block_q, block_kv=block_kv), TileStates(some, every)


def _largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(most, 1))
