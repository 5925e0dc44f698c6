"""What a walk computes, looked at pair by pair, and the masks and blocks to look at."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from smalti import masks
from smalti.attention.tpu.known import GRAIN, Cells
from smalti.attention.tpu.plan import Divided, divisions
from smalti.attention.tpu.tiles import Blocks, Part, Walk, strips
from smalti.masks import BlockMask
from smalti.masks.mask_mod import CUT, EMPTY, WHOLE
from smalti.tpu.lanes import LANES, round_up

Sizes = tuple[int, int, int, int]  # B, Hq, Sq, Sk
SIZES = 2, 1, 700, 900
BLOCKS = Blocks(256, 384, 128, 512, 768)  # strips narrower than a tile
# One major block for all, one for each tile, several tiles in each of several, and all keys in one.
MAJORS = [(1024, 1152), (256, 384), (512, 768), (256, 1152)]
# Of a walk that visits every pair of major blocks, and has tiles in each.
NOTHING_HELD = dict.fromkeys(("kv_fetch", "q_fetch", "pairs_by_q", "pairs_by_kv"))


def ids(batch: int, length: int, seed: int, low: int = -1) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(low, 4, (batch, length))
    return np.sort(drawn, 1).astype(np.int32)


# Of two batch entries, one head, 700 queries and 900 keys. Known ones, of all entries alike:
KNOWN = {
    "full": masks.full,
    "causal": masks.causal,
    "causal, empty rows": lambda: masks.causal(offset=-300),
    "window": lambda: masks.sliding_window(200),
    "local": lambda: masks.local(150, 70),
    "local, nobody": lambda: masks.local(-5, 4),
    "local, far away": lambda: masks.local(150, 70, offset=5000),
    "streaming": lambda: masks.streaming(sinks=5, window=100),
    "streaming, many first keys": lambda: masks.streaming(sinks=150, window=100),
    "prefix, one": lambda: masks.prefix_lm(300),
    "lengths, one": lambda: masks.lengths(q=690, kv=517),
    "two documents": lambda: masks.document((np.arange(700) // 400, np.arange(900) // 384)),
    "three documents": lambda: masks.document((np.arange(700) // 256, np.arange(900) // 384)),
    "function": lambda: masks.full() & (lambda b, h, q, k: (k >= 10) & (k <= q + 30)),
    "nobody": lambda: ~masks.full(),
}
MASKS = KNOWN | {
    "documents": lambda: masks.document((ids(2, 700, 0), ids(2, 900, 1))),
    "lengths": lambda: masks.lengths(q=np.array([700, 100]), kv=np.array([0, 517])),
    "prefix": lambda: masks.prefix_lm(np.array([300, 0])) & ~masks.local(10, 10),
    "documents, causal": lambda: masks.document((ids(2, 700, 0), ids(2, 900, 1))) & masks.causal(),
    "lengths, window": lambda: masks.sliding_window(200) & masks.lengths(kv=np.array([333, 900])),
}


def visible_pairs(mask: Any, sizes: Sizes) -> np.ndarray:
    """bool ``[B, Hq, Sq, Sk]``"""
    if mask is None:
        return np.ones(sizes, bool)
    mask = mask.mask if isinstance(mask, BlockMask) else mask
    indices = np.ix_(*(np.arange(n, dtype=np.int32) for n in sizes))
    return np.broadcast_to(np.asarray(mask(*indices)), sizes)


def cells_of(visible: np.ndarray) -> Cells:
    """The cells of ``visible [Sq, Sk]``, without a mask."""
    q_len, kv_len = visible.shape
    # A query that does not exist may see anything, a key that does not exist is seen by nobody.
    some = np.pad(visible, ((0, -q_len % LANES), (0, 0)))
    every = np.pad(visible, ((0, -q_len % LANES), (0, 0)), constant_values=True)
    every, some = (np.pad(x, ((0, 0), (0, -kv_len % LANES))) for x in (every, some))
    shape = round_up(q_len) // LANES, round_up(kv_len) // LANES
    state, pattern, patterns = np.zeros(shape, np.int8), np.zeros(shape, np.int32), []
    for row, column in np.ndindex(shape):
        here = (
            slice(row * LANES, (row + 1) * LANES),
            slice(column * LANES, (column + 1) * LANES),
        )
        if every[here].all():
            state[row, column] = WHOLE
        elif not some[here].any():
            state[row, column] = EMPTY
        else:
            state[row, column] = CUT
            same = [n for n, x in enumerate(patterns) if (x == every[here].T).all()]
            pattern[row, column] = same[0] if same else len(patterns)
            patterns += [] if same else [every[here].T]
    patterns = np.stack(patterns) if patterns else np.zeros((1, LANES, LANES), bool)
    return Cells(state, pattern, patterns, q_len, kv_len)


class Call(NamedTuple):
    """A mask bound to `SIZES`, and the ways to divide it, each with what a kernel evaluates: the
    rest, or, where there is none, all of the mask, in the parts of a known one that are no band."""

    mask: Any
    visible: np.ndarray
    divided: list[tuple[Divided, np.ndarray]]


@functools.cache
def call_of(name: str) -> Call:
    """Of one of `MASKS`."""
    mask = MASKS[name]().bind(*SIZES)
    visible, divided = visible_pairs(mask, SIZES), []
    for found in divisions(mask, SIZES):
        evaluated = visible if found.rest is None else visible_pairs(found.rest, SIZES)
        divided.append((found, evaluated))
    return Call(mask, visible, divided)


def with_majors(major_q: int, major_kv: int, blocks: Blocks = BLOCKS) -> Blocks:
    return dataclasses.replace(blocks, major_q=major_q, major_kv=major_kv)


def lists_of(walk: Walk) -> Iterator[list]:
    """For every list, the tiles of each class: (parts, [(first query, first key), …]), both counted
    in the major block."""
    for n, row in enumerate(np.asarray(walk.lists)[:, 0]):
        counts, tiles = iter(row[: walk.num_counts]), row[walk.num_counts :]
        at, classes = 0, []
        for tile_class in walk.classes[n if len(walk.classes) > 1 else 0]:
            count = int(next(counts)) if tile_class.count is None else tile_class.count
            assert at + count <= len(tiles)
            places = [
                (int(t >> 16) * walk.blocks.block_q, int(t & 0xFFFF) * LANES)
                for t in tiles[at : at + count]
            ]
            classes.append((tile_class.parts, places))
            at += count
        yield classes


def shown_by(part: Part) -> np.ndarray:
    """bool ``[keys, queries]``: what a part does not hide by its own, as `Part` says it."""
    key = np.arange(part.kv_start, part.kv_stop)[:, None]
    query = np.arange(part.q_start, part.q_stop)[None, :]
    shown = np.ones((key.size, query.size), bool)
    if part.band is not None:
        low, high = part.band
        shown &= True if low is None else key - query >= low
        shown &= True if high is None else key - query <= high
        shown |= key < part.kv_start + part.lead
    if part.seen is not None:
        shown &= (key >= part.seen[0]) & (key < part.seen[1])
    return shown


class Visits(NamedTuple):
    """Of every pair, padding included: ``[B, Hq, Sq, Sk]``, and of every query alike."""

    computed: np.ndarray  # int: how often
    shown: np.ndarray  # bool: it is computed, and not hidden by what is known
    masked: np.ndarray  # bool: the mask is evaluated
    guarded: np.ndarray  # bool: keys that nobody sees are looked for
    read: np.ndarray  # bool: the key's value meets a weight, be it 0
    in_strips: np.ndarray  # int [B, Hq, Sq]: how many have the query
    unasked: np.ndarray  # bool [B, Hq, Sq]: one of them evaluates no mask


def visits(walk: Walk, batch: int, heads: int) -> Visits:
    blocks, (rows, _) = walk.blocks, walk.tile_shape
    shape = batch, heads, walk.q_padded, walk.kv_padded
    kinds = dict.fromkeys(("shown", "masked", "guarded", "read"), bool)
    found = Visits(
        **{name: np.zeros(shape, kind) for name, kind in ({"computed": int} | kinds).items()},
        in_strips=np.zeros(shape[:3], int),
        unasked=np.zeros(shape[:3], bool),
    )
    lists = list(lists_of(walk))
    for b, h, i, j in np.ndindex(batch, heads, walk.num_q, walk.num_kv):
        for parts, tiles in lists[walk.list_index(b, h, i, j)]:
            for part in parts:
                check_part(part, blocks)
                assert part.rows.stop <= rows
            for first_query, first_key in tiles:
                q, kv = i * blocks.major_q + first_query, j * blocks.major_kv
                assert first_query + blocks.block_q <= blocks.major_q
                for strip in strips(parts):
                    queries = slice(q + strip[0].q_start, q + strip[0].q_stop)
                    found.in_strips[b, h, queries] += 1
                    found.unasked[b, h, queries] |= not any(part.masked for part in strip)
                    used = np.zeros(rows, int)
                    for part in strip:
                        used[part.rows] += 1
                        first = first_key if part.place is None else 0
                        assert first + part.kv_stop <= blocks.major_kv
                        keys = slice(kv + first + part.kv_start, kv + first + part.kv_stop)
                        here = b, h, queries, keys
                        found.computed[here] += 1
                        found.shown[here] |= shown_by(part).T
                        found.masked[here] |= part.masked
                        found.guarded[here] |= part.guarded
                        key = np.arange(part.kv_start, part.kv_stop)
                        seen = (part.kv_start, part.kv_stop) if part.seen is None else part.seen
                        found.read[here] |= (key >= seen[0]) & (key < seen[1])
                    assert used.max() <= 1, "two parts of a strip have scores in the same place"
    return found


def check_part(part: Part, blocks: Blocks) -> None:
    assert part.q_start % LANES == part.q_stop % LANES == 0
    assert 0 <= part.q_start < part.q_stop <= blocks.block_q
    grain = LANES if blocks.keys_in_lanes else GRAIN
    assert part.kv_start % grain == part.kv_stop % grain == 0
    assert 0 <= part.kv_start < part.kv_stop <= blocks.block_kv
    assert part.masked or not part.guarded
    assert part.seen is None or part.band is not None, "what is not seen must be hidden"


def check(
    walk: Walk, sizes: Sizes, visible: np.ndarray, evaluated: np.ndarray | None, *, exact=True
) -> Visits:
    """Whether a walk computes ``visible [B, Hq, Sq, Sk]``, where it evaluates a mask that says
    ``evaluated`` (None: there is none). Returns what it visits.

    exact: no tile is visited without a visible pair.
    """
    batch, heads, q_len, kv_len = sizes
    found = visits(walk, batch, heads)
    real = np.s_[..., :q_len, :kv_len]
    assert found.computed.max(initial=0) <= 1
    assert (found.computed[real] == 1)[visible].all(), "a visible pair is left out"
    shown = found.shown & (found.computed > 0)
    if evaluated is None:
        assert not found.masked.any(), "there is no mask to evaluate"
    else:
        shown[real] &= ~found.masked[real] | evaluated
    np.testing.assert_array_equal(shown[real], visible)
    past = found.shown[..., :q_len, kv_len:] & ~found.masked[..., :q_len, kv_len:]
    assert not past.any(), "keys that do not exist are taken for seen"
    # What no query of its head sees may be NaN, and must meet nothing, not even a weight of 0.
    unseen = np.broadcast_to(~visible.any(2, keepdims=True), visible.shape)
    assert not (found.read & ~found.guarded)[real][unseen].any(), "a key that nobody sees is read"
    empty = ~visible.any(-1)
    assert walk.empty_rows or not empty.any()
    assert walk.empty_in_bands or not (empty & found.unasked[..., :q_len]).any()
    check_pairs(walk, batch, heads)
    if walk.one_tile_per_query:
        assert walk.num_kv == 1
        assert (found.in_strips[..., :q_len] == 1).all()
    if exact:
        check_none_is_empty(walk, sizes, visible)
    return found


def check_pairs(walk: Walk, batch: int, heads: int) -> None:
    """That no pair of major blocks with tiles is left out, and each block's results are written."""
    if walk.pairs_by_q is None or walk.pairs_by_kv is None:
        assert walk.pairs_by_q is walk.pairs_by_kv is None
        return
    lists = list(lists_of(walk))
    live = {
        (i, j)
        for b, h, i, j in np.ndindex(batch, heads, walk.num_q, walk.num_kv)
        if any(tiles for _, tiles in lists[walk.list_index(b, h, i, j)])
    }
    every = (walk.pairs_by_q, 0, walk.num_q), (walk.pairs_by_kv, 1, walk.num_kv)
    for pairs, axis, num in every:
        places = [(int(p) >> 16, int(p) & 0xFFFF) for p in pairs]
        assert len(set(places)) == len(places)
        assert live <= set(places)
        own = [place[axis] for place in places]
        assert own == sorted(own), "the steps of a block follow each other"
        assert set(own) == set(range(num))
        # Of a block without any, one; else none that has no tiles.
        for n in range(num):
            mine = {place for place in places if place[axis] == n}
            assert mine <= live or (len(mine) == 1 and not mine & live)


def check_none_is_empty(walk: Walk, sizes: Sizes, visible: np.ndarray) -> None:
    blocks, lists = walk.blocks, list(lists_of(walk))
    for b, h, i, j in np.ndindex(*sizes[:2], walk.num_q, walk.num_kv):
        for parts, tiles in lists[walk.list_index(b, h, i, j)]:
            for first_query, first_key in tiles:
                live = []
                for part in parts:
                    q = i * blocks.major_q + first_query
                    kv = j * blocks.major_kv + (first_key if part.place is None else 0)
                    queries = slice(q + part.q_start, q + part.q_stop)
                    keys = slice(kv + part.kv_start, kv + part.kv_stop)
                    live.append(visible[b, h, queries, keys].any())
                assert any(live), (parts, first_query, first_key)
