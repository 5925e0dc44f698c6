"""Tiles of the score matrix: those that masks classify, and where one step of a kernel stands."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax


class Tiles:
    """Tiles that a mask classifies: a whole `TileGrid`, or `SomeTiles` of it.

    ``q_tiles`` and ``kv_tiles`` broadcast to the shape of the answer, ``[B or 1, H or 1, rows,
    tiles]``; so do the first and last token of each tile, inclusive, cut at the lengths.
    """

    grid: TileGrid
    q_tiles: np.ndarray  # int32 [1, 1, rows, 1]
    kv_tiles: Any  # int32 [1 or B, 1 or H, 1 or rows, tiles]; may be traced

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.q_tiles.shape, self.kv_tiles.shape)

    @property
    def q_first(self):
        return self.q_tiles * self.grid.block_q

    @property
    def q_last(self):
        return _minimum(self.q_first + self.grid.block_q, self.grid.q_len) - 1

    @property
    def kv_first(self):
        return self.kv_tiles * self.grid.block_kv

    @property
    def kv_last(self):
        return _minimum(self.kv_first + self.grid.block_kv, self.grid.kv_len) - 1


@dataclasses.dataclass(frozen=True)
class TileGrid(Tiles):
    """The ``[Sq, Sk]`` score matrix of each (batch entry, query head), cut into tiles.

    The last tile of either axis may be ragged; indices past the end do not exist.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def num_q(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def num_kv(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def grid(self) -> TileGrid:
        return self

    @property
    def q_tiles(self) -> np.ndarray:
        return np.arange(self.num_q, dtype=np.int32)[None, None, :, None]

    @property
    def kv_tiles(self) -> np.ndarray:
        return np.arange(self.num_kv, dtype=np.int32)[None, None, None, :]


@dataclasses.dataclass(frozen=True, eq=False)
class SomeTiles(Tiles):
    """Some rows of a grid, and in each of them some tiles, or all."""

    grid: TileGrid
    q_tiles: np.ndarray
    kv_tiles: Any


def _minimum(array: Any, most: int):
    return np.minimum(array, most) if isinstance(array, np.ndarray) else jnp.minimum(array, most)


@dataclasses.dataclass(frozen=True)
class TileIndex:
    """Where one step of a kernel stands: a run of batch entries, query heads and queries, and a
    list of key tiles, which need not be neighbours. Starts may be traced.
    """

    b_start: Any  # first batch entry
    h_start: Any  # first query head
    q_start: Any  # first query
    kv_tiles: Any  # int32 [n], tiles of block_kv keys each
    num_b: int
    num_h: int
    block_q: int
    block_kv: int

    @property
    def b(self):  # int32 [num_b]
        return self.b_start + lax.iota(jnp.int32, self.num_b)

    @property
    def h(self):  # int32 [num_h], query heads
        return self.h_start + lax.iota(jnp.int32, self.num_h)

    @property
    def q_idx(self):  # int32 [block_q]
        return self.q_start + lax.iota(jnp.int32, self.block_q)

    @property
    def num_kv(self) -> int:
        return self.kv_tiles.shape[0] * self.block_kv

    @property
    def kv_idx(self):  # int32 [num_kv]
        offsets = lax.iota(jnp.int32, self.block_kv)
        return (self.kv_tiles[:, None] * self.block_kv + offsets[None, :]).reshape(-1)

    def starts(self, shape, kv_tile):
        """Where this step's part of a ``[B or 1, H or 1, Sq or 1, Sk or 1]`` array begins and its
        sizes, for one key tile."""
        full = (self.b_start, self.h_start, self.q_start, kv_tile * self.block_kv)
        sizes = (self.num_b, self.num_h, self.block_q, self.block_kv)
        start = tuple(i if n > 1 else 0 for i, n in zip(full, shape, strict=True))
        size = tuple(s if n > 1 else 1 for s, n in zip(sizes, shape, strict=True))
        return int32s(*start), size

    def slice(self, array):
        """This step's part of an array that broadcasts to ``[B, H, Sq, Sk]`` (padded to tiles)."""
        tiles = [0] if array.shape[3] == 1 else list(self.kv_tiles)
        parts = [lax.dynamic_slice(array, *self.starts(array.shape, tile)) for tile in tiles]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)


def int32s(*indices) -> tuple:
    """Indices of one type, which slices need: with x64 enabled, Python's ints would be int64."""
    return tuple(jnp.asarray(i, jnp.int32) for i in indices)


def is_known(tree: Any) -> bool:
    """Whether all arrays of a mask, or of any other tree, have values while tracing."""
    return not any(isinstance(x, core.Tracer) for x in jax.tree.leaves(tree))


def as_known(array):
    """``array`` as NumPy if its values are known while tracing, else as it is."""
    return array if isinstance(array, core.Tracer) else np.asarray(array)


def reduce_tiles(visible: Any, block_q: int, block_kv: int, *, every: bool):
    """any (``every=False``) or all (``every=True``) over the tiles of ``[..., q, kv]``.

    What is missing from ragged tiles is neutral.
    """
    xp: Any = np if isinstance(visible, np.ndarray) else jnp
    q_len, kv_len = visible.shape[-2:]
    pad = [(0, 0)] * (visible.ndim - 2) + [(0, -q_len % block_q), (0, -kv_len % block_kv)]
    visible = xp.pad(visible, pad, constant_values=every)
    *lead, rows, cols = visible.shape
    visible = visible.reshape(*lead, rows // block_q, block_q, cols // block_kv, block_kv)
    return visible.all(axis=(-3, -1)) if every else visible.any(axis=(-3, -1))
