"""The walk of a call: over a known mask's own tiles where they are few kinds, else over lists."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from smalti.attention.tpu.known import Cells, plan_known
from smalti.attention.tpu.tiles import Blocks, Part, TileClass, Walk, held, is_known
from smalti.eagerly import eagerly
from smalti.masks import BlockMask, Mask
from smalti.masks.tiles import TileGrid, reduce_tiles
from smalti.tpu.lanes import LANES

DEAD = 3  # the state of a tile that is not visited; the others number its class


def plan(
    mask: Mask | BlockMask,
    cells: Cells | None,
    sizes: tuple[int, int, int, int],
    blocks: Blocks,
    *,
    may_hide: bool = False,
) -> Walk:
    """The walk for a mask bound to the call, or for a BlockMask, whose tiles ``blocks`` has.

    cells: of the mask, where it is known (`known.find_cells`). sizes: B, Hq, Sq, Sk. may_hide:
    scores may hide keys, too, so that every tile needs looking at.
    """
    if cells is not None and not may_hide:
        walk = plan_known(cells, blocks)
        if walk is not None:
            return walk
    return _plan_lists(mask, sizes, blocks, may_hide)


def whole_parts(blocks: Blocks) -> tuple[Part, ...]:
    return (Part(0, blocks.block_q, 0, blocks.block_kv),)


def cut_parts(blocks: Blocks, *, guarded: bool = False) -> tuple[Part, ...]:
    return (Part(0, blocks.block_q, 0, blocks.block_kv, masked=True, guarded=guarded),)


def _plan_lists(
    mask: Mask | BlockMask, sizes: tuple[int, int, int, int], blocks: Blocks, may_hide: bool
) -> Walk:
    batch, heads, q_len, kv_len = sizes
    grid = TileGrid(batch, heads, q_len, kv_len, blocks.block_q, blocks.block_kv)
    if isinstance(mask, BlockMask):
        states, mask = mask.states(), mask.mask
    else:
        states = mask.classify(grid)
    seen = None if may_hide else _surely_seen(mask, grid)
    known = all(isinstance(x, np.ndarray) for x in (*states, seen) if x is not None)
    xp: Any = np if known else jnp
    some, every = xp.broadcast_arrays(*states)
    # A tile that sticks out past the keys needs the mask: what sticks out is not there.
    fits = np.arange(1, grid.num_kv + 1) * blocks.block_kv <= kv_len
    every = every & some & fits & (not may_hide)
    guarded = True if seen is None else ~seen
    state = xp.where(every, 0, xp.where(some, xp.where(guarded, 2, 1), DEAD))
    entries = state.shape[:2]
    num_q, num_kv = -(-q_len // blocks.major_q), -(-kv_len // blocks.major_kv)
    per_q, per_kv = blocks.major_q // blocks.block_q, blocks.major_kv // blocks.block_kv
    pad = ((0, 0), (0, 0), (0, num_q * per_q - grid.num_q), (0, num_kv * per_kv - grid.num_kv))
    state = xp.pad(state, pad, constant_values=DEAD)
    state = state.reshape(-1, num_q, per_q, num_kv, per_kv).swapaxes(2, 3)
    state = state.reshape(-1, num_q, num_kv, per_q * per_kv)
    order = xp.argsort(state, axis=-1, stable=True)
    tiles = order // per_kv << 16 | order % per_kv * (blocks.block_kv // LANES)
    # A class that no tile is in costs the kernel code.
    kinds = [n for n in range(DEAD) if not known or (state == n).any()] or [0]
    counts = xp.stack([(state == kind).sum(-1) for kind in kinds], -1)
    lists = xp.concatenate([counts, tiles], -1).astype(np.int32)
    live = counts.sum(-1) > 0  # [entries, num_q, num_kv]
    lists = lists.reshape(-1, 1, lists.shape[-1])
    parts = whole_parts(blocks), cut_parts(blocks), cut_parts(blocks, guarded=True)
    classes = tuple(TileClass(parts[kind], None) for kind in kinds)
    return Walk(
        lists=lists,
        **held(live, xp),
        classes=(classes,),
        blocks=blocks,
        q_len=q_len,
        kv_len=kv_len,
        entries=entries,
        empty_rows=True,
    )


def _surely_seen(mask: Mask, grid: TileGrid):
    """Bool ``[1 or B, 1 or Hq, 1, num_kv]``: whether every key of a column of tiles is seen, as far
    as one look at each key tells: by the query that meets it where the last meets the last."""
    key = np.arange(grid.kv_len, dtype=np.int32)
    query = np.clip(key - (grid.kv_len - grid.q_len), 0, grid.q_len - 1)
    b, h = (np.arange(n if varies else 1, dtype=np.int32) for n, varies in
            zip((grid.batch, grid.heads), mask.varies(), strict=True))  # fmt: skip
    indices = b[:, None, None], h[:, None], query, key
    seen = eagerly(mask, *indices) if is_known(mask) else mask(*indices)
    xp: Any = np if isinstance(seen, np.ndarray) else jnp
    seen = xp.broadcast_to(seen, (len(b), len(h), grid.kv_len))
    return reduce_tiles(seen[:, :, None], 1, grid.block_kv, every=True)
