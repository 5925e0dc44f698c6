"""Which tiles a kernel visits, in which order, and what it computes of each.

A tile is ``block_kv`` keys by ``block_q`` queries of one head. Kernels hold a major block of
queries and one of keys in VMEM and walk a flat list of the live tiles in them. Tiles of one class
are computed alike: the same rectangles, with the mask looked at in the same places. Known masks
have classes and tiles of their own (`known`); where part of a mask is traced, so are the lists,
over tiles on a grid (`plan`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

Band = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Part:
    """A rectangle of a tile: keys ``[kv_start, kv_stop)`` by queries ``[q_start, q_stop)``, all
    multiples of 128; of few keys, of 16.

    ``band``: of the keys seen, ``low ≤ key − query ≤ high``, counted in the tile; None, none is
    hidden. ``lead``: the first keys of the part that all see beside the band. ``seen``: keys that
    some query of the part sees, as a range; others may hold NaN. ``place``: where the scores of its
    first key are in the tile's; None, where that key is. Such keys are counted in the major block,
    wherever the tile is: the first tokens, which every tile of `masks.streaming` sees.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    band: Band | None = None
    lead: int = 0
    seen: tuple[int, int] | None = None
    place: int | None = None
    masked: bool = False  # the mask is evaluated; for what is no band
    guarded: bool = False  # some key may be seen by no query, and hold NaN: the kernel looks which

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def rows(self) -> slice:
        """Where its keys are among the rows of a tile's scores."""
        first = self.kv_start if self.place is None else self.place
        return slice(first, first + self.kv_stop - self.kv_start)


Parts = tuple[Part, ...]  # of a tile


def strips(parts: Parts) -> list[tuple[Part, ...]]:
    """The parts by the queries that they share; those of a strip are neighbours."""
    groups = itertools.groupby(parts, key=lambda part: (part.q_start, part.q_stop))
    return [tuple(group) for _, group in groups]


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
    keys_in_lanes: bool = False  # so that a part is of whole registers of keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of every pair of major blocks.

    ``lists``: int32 ``[num_lists, 1, counts + tiles]``; a list begins with the counts of those
    classes that do not know theirs; a tile is ``query tile << 16 | key tile``, counted in the major
    blocks. ``classes``: of each list, in their order; one tuple for all where counts are not known.
    ``kv_fetch``: int32 ``[1 or B · Hq, num_q, num_kv]``, which major block of keys is held while
    that pair is visited: of a pair without tiles, the next one that is needed. None where there is
    one. ``q_fetch``: int32 ``[1 or B · Hq, num_kv, num_q]``, the same for major blocks of queries.
    ``pairs_by_q``, ``pairs_by_kv``: int32 ``[n]``, where it is known that some pairs have no tiles:
    those that have, ``i << 16 | j``, ordered by their block of queries, or of keys.
    """

    lists: Any
    kv_fetch: Any
    q_fetch: Any
    pairs_by_q: Any
    pairs_by_kv: Any
    classes: tuple[tuple[TileClass, ...], ...] = dataclasses.field(metadata={"static": True})
    blocks: Blocks = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    kv_len: int = dataclasses.field(metadata={"static": True})
    entries: tuple[int, int] = dataclasses.field(metadata={"static": True})  # 1 or B, 1 or Hq
    # Some queries may see no key; and some of these may be in tiles that do not evaluate a mask.
    empty_rows: bool = dataclasses.field(metadata={"static": True})
    empty_in_bands: bool = dataclasses.field(metadata={"static": True})
    # Every query that exists is in one tile, which has all keys that it sees.
    one_tile_per_query: bool = dataclasses.field(metadata={"static": True}, default=False)

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
    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of a tile's scores."""
        return max([self.blocks.block_kv, *(p.rows.stop for p in self.parts)]), self.blocks.block_q

    @property
    def first_keys(self) -> int:
        """Rows of a tile's scores for keys whose place is not the tile's."""
        return self.tile_shape[0] - self.blocks.block_kv

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

    def entry(self, b, h):
        """Which of ``entries`` is that of a batch entry and a query head, all counted together."""
        batch, heads = self.entries
        return (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)

    def list_index(self, b, h, i, j):
        """Which list pair ``(i, j)`` of major blocks of a batch entry and query head walks."""
        if self.lists.shape[0] == 1:
            return 0
        return self.entry(b, h) * (self.num_q * self.num_kv) + i * self.num_kv + j


def held(live, xp) -> dict[str, Any]:
    """What a `Walk` says of pairs without tiles. live: bool ``[entries, num_q, num_kv]``."""
    _, num_q, num_kv = live.shape
    found: dict[str, Any] = dict.fromkeys(("kv_fetch", "q_fetch", "pairs_by_q", "pairs_by_kv"))
    if xp is np and num_kv > 1 and not live.all():
        some = live.any(0)
        found["pairs_by_q"] = _pairs(some)
        found["pairs_by_kv"] = _pairs(some.T, swapped=True)
    if num_kv > 1:
        found["kv_fetch"] = _next_live(live, xp)
    if num_q > 1 and num_kv > 1:  # with one, that launch makes dQ, whose blocks are where it is
        found["q_fetch"] = _next_live(live.swapaxes(1, 2), xp)
    return found


def _pairs(live: np.ndarray, *, swapped: bool = False) -> np.ndarray:
    """The places of True, row by row; of a row without any its first, to write its results."""
    live = live.copy()
    live[~live.any(1), 0] = True
    row, column = np.nonzero(live)
    return (column << 16 | row if swapped else row << 16 | column).astype(np.int32)


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
