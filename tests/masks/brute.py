"""Masks beside their formulas, written a second time over whole ``[B, H, Sq, Sk]`` arrays."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from smalti import masks
from smalti.masks import Mask
from smalti.masks.mask_mod import as_mask
from smalti.masks.tiles import TileGrid

# Ragged tiles on both axes, Sq < Sk, Sq > Sk, one of everything.
GRIDS = {
    "7x9": TileGrid(2, 3, 7, 9, block_q=3, block_kv=2),
    "16x16": TileGrid(2, 3, 16, 16, block_q=4, block_kv=4),
    "5x12": TileGrid(2, 3, 5, 12, block_q=8, block_kv=5),
    "12x5": TileGrid(2, 3, 12, 5, block_q=4, block_kv=2),
    "1x1": TileGrid(2, 3, 1, 1, block_q=1, block_kv=1),
}


@dataclasses.dataclass(frozen=True)
class Case:
    mask: Mask
    visible: np.ndarray  # bool [B, H, Sq, Sk], by the formula


def shape(grid: TileGrid) -> tuple[int, int, int, int]:
    return grid.batch, grid.heads, grid.q_len, grid.kv_len


def indices(grid: TileGrid) -> list[np.ndarray]:
    """b, h, q_idx, kv_idx, each int32 of four dimensions."""
    return list(np.ix_(*(np.arange(n, dtype=np.int32) for n in shape(grid))))


def evaluate(mask, grid: TileGrid) -> np.ndarray:
    """What the mask itself says, element by element."""
    visible = as_mask(mask).bind(*shape(grid))(*indices(grid))
    return np.broadcast_to(np.asarray(visible), shape(grid))


def tiles_of(visible: np.ndarray, grid: TileGrid) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles hold some visible pair, and every pair, by looking: ``[B, H, nq, nk]``."""
    q_starts = np.arange(0, grid.q_len, grid.block_q)
    kv_starts = np.arange(0, grid.kv_len, grid.block_kv)

    def reduce(function, array):
        return function.reduceat(function.reduceat(array, q_starts, axis=2), kv_starts, axis=3)

    return reduce(np.logical_or, visible), reduce(np.logical_and, visible)


def states_of(mask: Mask, grid: TileGrid) -> tuple[np.ndarray, np.ndarray]:
    """What the mask says of the same tiles without looking."""
    some, every = mask.bind(*shape(grid)).classify(grid)
    full = (grid.batch, grid.heads, grid.num_q, grid.num_kv)
    return np.broadcast_to(some, full), np.broadcast_to(every, full)


def catalogue_cases(grid: TileGrid) -> dict[str, Case]:
    """Each mask of the catalogue: offsets default, negative and by batch entry; packed ids."""
    _, _, i, j = indices(grid)
    last = i + grid.kv_len - grid.q_len  # the last query meets the last key
    two = np.array([1, -2], np.int32)
    by_batch = two[:, None, None, None]
    rng = np.random.default_rng([grid.q_len, grid.kv_len])
    q_ids = np.sort(rng.integers(-1, 3, (2, grid.q_len)), 1).astype(np.int32)
    kv_ids = np.sort(rng.integers(-1, 3, (2, grid.kv_len)), 1).astype(np.int32)
    same = q_ids[:, None, :, None] == kv_ids[:, None, None, :]
    one_id = q_ids[0, None, None, :, None] == kv_ids[0]
    short_q, short_kv = np.array([3, 1]), np.array([0, 5])
    found = {
        "full": (masks.full(), i >= 0),
        "causal": (masks.causal(), j <= last),
        "causal(0)": (masks.causal(0), j <= i),
        "causal(-3)": (masks.causal(-3), j <= i - 3),
        "causal(offset [B])": (masks.causal(two), j <= i + by_batch),
        "sliding_window(3)": (
            masks.sliding_window(3),
            (np.maximum(0, last - 3 + 1) <= j) & (j <= last),
        ),
        "sliding_window(1)": (masks.sliding_window(1), j == last),
        "sliding_window(2, [B])": (
            masks.sliding_window(2, two),
            (i + by_batch - 1 <= j) & (j <= i + by_batch),
        ),
        "local(2, 1)": (masks.local(2, 1), (i - 2 <= j) & (j <= i + 1)),
        "local(0, 0)": (masks.local(0, 0), i == j),
        "local(1, 3, 2)": (masks.local(1, 3, 2), (i + 1 <= j) & (j <= i + 5)),
        "streaming(2, 3)": (
            masks.streaming(sinks=2, window=3),
            ((j < 2) | (np.maximum(2, last - 2) <= j)) & (j <= last),
        ),
        "streaming(0, 2)": (
            masks.streaming(sinks=0, window=2),
            (last - 1 <= j) & (j <= last),
        ),
        "streaming(3, 1, [B])": (
            masks.streaming(sinks=3, window=1, offset=two),
            ((j < 3) | (i + by_batch <= j)) & (j <= i + by_batch),
        ),
        "prefix_lm(3)": (masks.prefix_lm(3), (j < 3) | (j <= last)),
        "prefix_lm([B], 0)": (
            masks.prefix_lm(np.array([1, 4]), 0),
            (j < np.array([1, 4])[:, None, None, None]) | (j <= i),
        ),
        "document": (
            masks.document((q_ids, kv_ids)),
            same & (q_ids >= 0)[:, None, :, None],
        ),
        "document, one for all": (
            masks.document((q_ids[0], kv_ids[0])),
            one_id & (q_ids[0] >= 0)[:, None],
        ),
        "lengths(q, kv)": (
            masks.lengths(q=short_q, kv=short_kv),
            (i < short_q[:, None, None, None]) & (j < short_kv[:, None, None, None]),
        ),
        "lengths(kv=3)": (masks.lengths(kv=3), j < 3),
        "lengths(q=2)": (masks.lengths(q=2), i < 2),
    }
    return {
        name: Case(mask, np.broadcast_to(visible, shape(grid)))
        for name, (mask, visible) in found.items()
    }


def general_cases(grid: TileGrid) -> dict[str, Case]:
    """Masks that nothing is known of beforehand."""
    b, h, i, j = indices(grid)
    rng = np.random.default_rng(grid.q_len)
    table = rng.integers(0, 2, grid.kv_len).astype(np.int32)
    arrays = {
        dims: rng.random([n if d in dims else 1 for d, n in zip("bhqk", shape(grid), strict=True)])
        < 0.7
        for dims in ("bhqk", "hk", "bq")
    }
    q_ids = rng.integers(-1, 2, (2, grid.q_len)).astype(np.int32)  # not packed
    kv_ids = rng.integers(-1, 2, (2, grid.kv_len)).astype(np.int32)
    found = {
        "mask_mod": (lambda b, h, q, k: (q - k + h) % 3 == b, (i - j + h) % 3 == b),
        "mask_mod of q and k": (lambda b, h, q, k: k <= q, j <= i),
        "mask_mod with a table": (
            lambda b, h, q, k: jnp.asarray(table)[k] > 0,
            table[j] > 0,
        ),
        **{f"array over {dims}": (array, array) for dims, array in arrays.items()},
        "document, unordered": (
            masks.document((q_ids, kv_ids)),
            (q_ids[:, None, :, None] == kv_ids[:, None, None, :]) & (q_ids >= 0)[:, None, :, None],
        ),
    }
    return {
        name: Case(as_mask(mask), np.broadcast_to(visible, shape(grid)))
        for name, (mask, visible) in found.items()
    }
