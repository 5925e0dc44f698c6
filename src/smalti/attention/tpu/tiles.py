"""Which tiles a kernel visits, in which order, and what it computes of each.

A tile is ``block_kv`` keys by ``block_q`` queries of one head. Kernels hold a major block of
queries and one of keys in VMEM and walk a flat list of the live tiles in them. Tiles of one class
are computed alike: the same rectangles, with the mask looked at in the same places. A mask that is
a fixed band along the diagonal has few classes, all known when the kernel is traced; any other mask
has two, whole and cut, and its list may be traced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smalti.masks import Mask
from smalti.masks.tiles import TileGrid
from smalti.tpu.lanes import LANES, round_up

Band = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Part:
    """A rectangle of a tile: keys ``[kv_start, kv_stop)`` by queries ``[q_start, q_stop)``, all
    multiples of 128.

    ``band``: of the keys seen, ``low ≤ key − query ≤ high``, counted in the tile; None, none is
    hidden. ``seen``: keys that some query of the part sees, as a range; others may hold NaN.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    band: Band | None = None
    seen: tuple[int, int] | None = None
    masked: bool = False  # the mask is evaluated; for what is no band

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.kv_start, self.kv_stop)


@dataclasses.dataclass(frozen=True)
class TileClass:
    """Tiles computed alike. ``count`` None: it is the next of the list's leading counts."""

    parts: tuple[Part, ...]
    count: int | None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The sizes of tiles, and of what is held in VMEM. All in tokens."""

    block_q: int  # queries of a tile
    block_kv: int  # keys of a tile
    cut_q: int  # queries of a strip, at the edge of a band, where narrower wastes less
    major_q: int  # queries in VMEM, a multiple of block_q
    major_kv: int  # keys in VMEM, a multiple of block_kv
    key_buffers: int = 2  # of keys and values: 1 where the next head's cannot wait in VMEM
    streamed: bool = False  # score tiles go through the matrix units row by row; see `choose`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of every pair of major blocks.

    ``lists``: int32 ``[num_lists, 1, counts + tiles]``; a list begins with the counts of those
    classes that do not know theirs; a tile is ``query tile << 16 | key tile``, counted in the major
    blocks. ``classes``: of each list, in their order; one tuple for all where counts are not known.
    ``kv_fetch``: int32 ``[1 or B, num_q, num_kv]``, which major block of keys is held while that
    pair is visited: of a pair without tiles, the next one that is needed. None where there is one.
    ``q_fetch``: int32 ``[1 or B, num_kv, num_q]``, the same for major blocks of queries.
    """

    lists: Any
    kv_fetch: Any
    q_fetch: Any
    classes: tuple[tuple[TileClass, ...], ...] = dataclasses.field(metadata={"static": True})
    blocks: Blocks = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    kv_len: int = dataclasses.field(metadata={"static": True})
    per_batch: bool = dataclasses.field(metadata={"static": True})
    empty_rows: bool = dataclasses.field(metadata={"static": True})  # there may be some

    @property
    def num_q(self) -> int:
        return -(-self.q_len // self.blocks.major_q)

    @property
    def num_kv(self) -> int:
        return -(-self.kv_len // self.blocks.major_kv)

    @property
    def q_padded(self) -> int:
        return self.num_q * self.blocks.major_q

    @property
    def kv_padded(self) -> int:
        return self.num_kv * self.blocks.major_kv

    @property
    def num_counts(self) -> int:
        return sum(c.count is None for c in self.classes[0])

    @property
    def parts(self) -> set[Part]:
        return {part for classes in self.classes for c in classes for part in c.parts}

    @property
    def num_scores(self) -> int | None:
        """How many scores a head computes; None where the kernel alone will know."""
        if self.num_counts:
            return None
        every = (c for classes in self.classes for c in classes)
        return sum(
            (c.count or 0) * sum((p.q_stop - p.q_start) * (p.kv_stop - p.kv_start) for p in c.parts)
            for c in every
        )

    def list_index(self, b, i, j):
        """Which list pair ``(i, j)`` of major blocks of batch entry ``b`` walks."""
        if self.lists.shape[0] == 1:
            return 0
        pair = i * self.num_kv + j
        return b * (self.num_q * self.num_kv) + pair if self.per_batch else pair


def plan(
    mask: Mask,
    band: Band | None,
    batch: int,
    q_len: int,
    kv_len: int,
    blocks: Blocks,
    *,
    may_hide: bool = False,
) -> Walk:
    """The walk for a mask bound to the call; ``band`` where it is one (`masking.band`).

    may_hide: scores may hide keys, too, so that every tile needs looking at.
    """
    if band is not None and kv_len <= blocks.major_kv and not may_hide:
        return plan_band(band, q_len, kv_len, blocks)
    return _plan_mask(mask, batch, q_len, kv_len, blocks, may_hide)


def plan_band(band: Band, q_len: int, kv_len: int, blocks: Blocks) -> Walk:
    """One list for each major block of queries; the keys are one."""
    lists, classes = [], []
    for start in range(0, q_len, blocks.major_q):
        stop = min(start + blocks.major_q, q_len)
        tiles, tile_classes = _list_of_band(band, start, stop, kv_len, blocks)
        lists.append(tiles)
        classes.append(tile_classes)
    most = max(1, *map(len, lists))
    low, high = band
    # Rows that see no key lie at either end.
    empty = (high is not None and high < 0) or (low is not None and q_len - 1 + low > kv_len - 1)
    empty = empty or _is_nothing(band)
    return Walk(
        lists=np.array([[tiles + [0] * (most - len(tiles))] for tiles in lists], np.int32),
        kv_fetch=None,
        q_fetch=None,
        classes=tuple(classes),
        blocks=blocks,
        q_len=q_len,
        kv_len=kv_len,
        per_batch=False,
        empty_rows=empty,
    )


def _list_of_band(
    band: Band, start: int, stop: int, kv_len: int, blocks: Blocks
) -> tuple[list[int], tuple[TileClass, ...]]:
    """The tiles of queries ``[start, stop)``, whole ones first, and their classes."""
    whole = whole_parts(blocks)
    found: dict[tuple[Part, ...], list[int]] = {whole: []}
    for i in range(-(-(stop - start) // blocks.block_q)):
        first = start + i * blocks.block_q
        for j in range(-(-kv_len // blocks.block_kv)):
            parts = band_parts(
                band,
                j * blocks.block_kv - first,
                min(blocks.block_q, stop - first),
                min(blocks.block_kv, kv_len - j * blocks.block_kv),
                blocks,
            )
            if parts:
                found.setdefault(parts, []).append(i << 16 | j)
    tiles = [tile for same in found.values() for tile in same]
    return tiles, tuple(TileClass(parts, len(same)) for parts, same in found.items() if same)


def whole_parts(blocks: Blocks) -> tuple[Part, ...]:
    return (Part(0, blocks.block_q, 0, blocks.block_kv),)


def cut_parts(blocks: Blocks) -> tuple[Part, ...]:
    return (Part(0, blocks.block_q, 0, blocks.block_kv, masked=True),)


def band_parts(
    band: Band, distance: int, num_q: int, num_kv: int, blocks: Blocks
) -> tuple[Part, ...]:
    """The parts of a tile whose first key is ``distance`` after its first query.

    Of its queries and keys the first ``num_q`` and ``num_kv`` exist. What does not exist may be
    computed for queries, and is hidden for keys.
    """
    if _is_nothing(band):
        return ()
    low, high = (None if bound is None else bound - distance for bound in band)
    last = num_q - 1
    sees_all = (low is None or low + last <= 0) and (high is None or num_kv - 1 <= high)
    if sees_all and num_kv == blocks.block_kv:
        return whole_parts(blocks)
    parts = []
    for q in range(0, num_q, blocks.cut_q):
        stop = min(q + blocks.cut_q, blocks.block_q)
        # Keys that a query of the part sees, and those that all of them see.
        begin = 0 if low is None else max(low + q, 0)
        end = num_kv if high is None else min(high + min(stop - 1, last) + 1, num_kv)
        if begin >= end:
            continue
        part = Part(q, stop, begin // LANES * LANES, min(round_up(end), blocks.block_kv))
        hidden_low = low is not None and part.kv_start < low + min(stop - 1, last)
        hidden_high = high is not None and part.kv_stop - 1 > high + q
        if hidden_low or hidden_high:
            part = dataclasses.replace(part, band=(low, high))
        if (begin, end) != (part.kv_start, part.kv_stop):
            part = dataclasses.replace(part, band=(low, high), seen=(begin, end))
        parts.append(part)
    return tuple(parts)


def _is_nothing(band: Band) -> bool:
    low, high = band
    return low is not None and high is not None and low > high


def _plan_mask(
    mask: Mask, batch: int, q_len: int, kv_len: int, blocks: Blocks, may_hide: bool
) -> Walk:
    grid = TileGrid(batch, 1, q_len, kv_len, blocks.block_q, blocks.block_kv)
    states = mask.classify(grid)
    known = isinstance(states.some, np.ndarray) and isinstance(states.every, np.ndarray)
    xp: Any = np if known else jnp
    some, every = (x[:, 0] for x in xp.broadcast_arrays(*states))
    # A tile that sticks out past the keys needs the mask: what sticks out is not there.
    fits = np.arange(1, grid.num_kv + 1) * blocks.block_kv <= kv_len
    every = every & some & fits[None, None, :] & (not may_hide)
    state = xp.where(every, 0, xp.where(some, 1, 2))  # whole, cut, dead
    num_q, num_kv = -(-q_len // blocks.major_q), -(-kv_len // blocks.major_kv)
    per_q, per_kv = blocks.major_q // blocks.block_q, blocks.major_kv // blocks.block_kv
    pad = ((0, 0), (0, num_q * per_q - grid.num_q), (0, num_kv * per_kv - grid.num_kv))
    state = xp.pad(state, pad, constant_values=2)
    state = state.reshape(-1, num_q, per_q, num_kv, per_kv).swapaxes(2, 3)
    state = state.reshape(-1, num_q, num_kv, per_q * per_kv)
    order = xp.argsort(state, axis=-1, stable=True)
    tiles = order // per_kv << 16 | order % per_kv
    counts = xp.stack([(state == kind).sum(-1) for kind in (0, 1)], -1)
    lists = xp.concatenate([counts, tiles], -1).astype(np.int32)
    live = counts.sum(-1) > 0  # [1 or B, num_q, num_kv]
    lists = lists.reshape(-1, 1, lists.shape[-1])
    classes = (TileClass(whole_parts(blocks), None), TileClass(cut_parts(blocks), None))
    return Walk(
        lists=lists,
        kv_fetch=_next_live(live, xp) if num_kv > 1 else None,
        q_fetch=_next_live(live.swapaxes(1, 2), xp) if num_q > 1 else None,
        classes=(classes,),
        blocks=blocks,
        q_len=q_len,
        kv_len=kv_len,
        per_batch=state.shape[0] > 1,
        empty_rows=True,
    )


def _next_live(live, xp):
    """For every place of the last axis the next that is live, or the last live one, or 0."""
    num = live.shape[-1]
    place = xp.where(live, np.arange(num), num)
    following = _minimum_from_right(place, xp)
    last = xp.max(xp.where(live, np.arange(num), 0), axis=-1, keepdims=True)
    return xp.where(following < num, following, last).astype(np.int32)


def _minimum_from_right(x, xp):
    if xp is np:
        return np.minimum.accumulate(x[..., ::-1], -1)[..., ::-1]
    return jax.lax.cummin(x, axis=x.ndim - 1, reverse=True)
