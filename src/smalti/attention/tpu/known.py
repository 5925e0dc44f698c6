"""Masks that are known when a kernel is traced: what each tile holds, looked at once.

The scores are cut into cells of 128 × 128. A mask says in closed form which are empty and whole;
the cut ones are evaluated, and equal ones counted once. A tile is then a run of live cells,
wherever it begins, and tiles that hold the same cells are of one class, whose parts need no mask in
the kernel: mostly they are bands. Causal attention has two cut classes, a window one or two,
whatever the sequence; where a mask has many (documents of all lengths), lists of tiles serve
better.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np

from smalti.attention.tpu.tiles import Blocks, Part, TileClass, Walk, held, strips
from smalti.eagerly import eagerly, remembered
from smalti.masks import Mask
from smalti.masks.mask_mod import CUT, EMPTY, WHOLE
from smalti.masks.tiles import TileGrid, is_known
from smalti.tpu.lanes import LANES, round_up

MOST_CELLS = 2**20  # of a head
MOST_PATTERNS = 64  # of cut cells
MOST_CLASSES = 8  # each is code of its own
MOST_LISTS = 4  # written out with their counts; else the kernel reads counts
NARROW = 64  # a part of so few keys is cut down to rows of GRAIN
GRAIN = 16  # keys that a register of bfloat16 holds below each other
AT_A_TIME = 512  # cells to evaluate


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one head's scores, the same for all."""

    state: np.ndarray  # int8 [Sq / 128, Sk / 128]
    pattern: np.ndarray  # int32 like it: of a cut cell, which
    patterns: np.ndarray  # bool [n, 128 keys, 128 queries]
    q_len: int
    kv_len: int

    def sees(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """bool: whether each query sees the key beside it."""
        row, column = query // LANES, key // LANES
        cell = self.patterns[self.pattern[row, column], key % LANES, query % LANES]
        state = self.state[row, column]
        return (state == WHOLE) | ((state == CUT) & cell)

    @functools.cached_property
    def seen(self) -> np.ndarray:
        """bool ``[keys]``: those that some query sees."""
        seen = np.repeat((self.state == WHOLE).any(0), LANES)
        for row, column in zip(*np.nonzero(self.state == CUT), strict=True):
            keys = slice(column * LANES, (column + 1) * LANES)
            if not seen[keys].all():
                real = self.q_len - row * LANES
                seen[keys] |= self.patterns[self.pattern[row, column]][:, :real].any(1)
        return seen

    @functools.cached_property
    def empty_rows(self) -> bool:
        """Whether some query sees no key."""
        some = np.repeat((self.state == WHOLE).any(1), LANES)
        for row, column in zip(*np.nonzero(self.state == CUT), strict=True):
            queries = slice(row * LANES, (row + 1) * LANES)
            if not some[queries].all():
                some[queries] |= self.patterns[self.pattern[row, column]].any(0)
        return not some[: self.q_len].all()

    def visible(self, rows: slice, columns: slice) -> np.ndarray:
        """bool ``[keys, queries]`` of a rectangle of cells; queries that do not exist may see."""
        state, pattern = self.state[rows, columns], self.pattern[rows, columns]
        cells = self.patterns[pattern] & (state == CUT)[..., None, None]
        cells = cells | (state == WHOLE)[..., None, None]  # [rows, columns, keys, queries]
        shape = cells.shape[1] * LANES, cells.shape[0] * LANES
        return cells.transpose(1, 2, 0, 3).reshape(shape)


@remembered
def find_cells(mask: Mask, sizes: tuple[int, int, int, int]) -> Cells | None:
    """None where the mask is traced, differs by batch entry or head, or has too much to look at."""
    _, _, q_len, kv_len = sizes
    num_q, num_kv = round_up(q_len) // LANES, round_up(kv_len) // LANES
    if not is_known(mask) or any(mask.varies()) or num_q * num_kv > MOST_CELLS:
        return None
    some, every = mask.classify(TileGrid(1, 1, q_len, kv_len, LANES, LANES))
    state = np.where(some, np.where(every, WHOLE, CUT), EMPTY)[0, 0]
    state = np.broadcast_to(state, (num_q, num_kv)).astype(np.int8)
    if kv_len % LANES:  # what sticks out past the keys is not there
        state = np.where((state == WHOLE) & (np.arange(num_kv) == num_kv - 1), CUT, state)
    rows, columns = np.nonzero(state == CUT)
    pattern = np.zeros(state.shape, np.int32)

    @jax.jit
    def evaluate(q, k):
        q = q[:, None, None] * LANES + np.arange(LANES, dtype=np.int32)
        k = k[:, None, None] * LANES + np.arange(LANES, dtype=np.int32)[:, None]
        visible = mask(0, 0, q, k) & (k < kv_len)
        return jax.numpy.broadcast_to(visible, (len(q), LANES, LANES))

    found: dict[bytes, int] = {}
    for first in range(0, len(rows), AT_A_TIME):
        here = slice(first, first + AT_A_TIME)
        places = [
            np.pad(x[here], (0, AT_A_TIME - len(x[here])), mode="edge") for x in (rows, columns)
        ]
        cells = eagerly(evaluate, *(x.astype(np.int32) for x in places))[: len(rows[here])]
        packed = np.packbits(cells.reshape(len(cells), -1), axis=1)
        for n, cell in enumerate(packed):
            pattern[rows[first + n], columns[first + n]] = found.setdefault(
                cell.tobytes(), len(found)
            )
        if len(found) > MOST_PATTERNS:
            return None
    patterns = np.frombuffer(b"".join(found) or bytes(LANES * LANES // 8), np.uint8)
    patterns = np.unpackbits(patterns.reshape(-1, LANES * LANES // 8), axis=1).astype(bool)
    return Cells(state, pattern, patterns.reshape(-1, LANES, LANES), q_len, kv_len)


def plan_known(cells: Cells, blocks: Blocks) -> Walk | None:
    """The walk over a known mask, or None where its tiles are of too many classes."""
    planner = Planner(cells, blocks)
    num_q, num_kv = -(-cells.q_len // blocks.major_q), -(-cells.kv_len // blocks.major_kv)
    lists = []
    for i, j in itertools.product(range(num_q), range(num_kv)):
        found = planner.tiles(i, j)
        if found is None:
            return None
        lists.append(found)
    counted = num_kv > 1 or num_q > MOST_LISTS
    every = planner.order
    rows, classes = [], []
    for found in lists:
        tiles = [tile for parts in every for tile in found.get(parts, ())]
        counts = [len(found.get(parts, ())) for parts in every]
        rows.append(counts + tiles if counted else tiles)
        known = zip(every, counts, strict=True)
        classes.append(tuple(TileClass(parts, count) for parts, count in known if count))
    most, empty = max(1, *map(len, rows)), cells.empty_rows
    live = np.array([bool(found) for found in lists]).reshape(1, num_q, num_kv)
    return Walk(
        lists=np.array([[row + [0] * (most - len(row))] for row in rows], np.int32),
        **held(live, np),
        classes=(tuple(TileClass(parts, None) for parts in every),) if counted else tuple(classes),
        blocks=blocks,
        q_len=cells.q_len,
        kv_len=cells.kv_len,
        entries=(1, 1),
        empty_rows=empty,
        empty_in_bands=empty,
        one_tile_per_query=num_kv == 1 and planner.one_tile_per_query,
    )


class Planner:
    """Finds the tiles of a known mask, and the class of each. A tile without a hidden pair is one
    part. Else each strip of queries is a part of its own: a band of the keys that it sees, or such
    a band beside first keys that all see, or, if it is neither, a rectangle in which the mask is
    evaluated. Where something else hides keys, too, none is taken for seen by somebody."""

    def __init__(self, cells: Cells, blocks: Blocks, *, mask_only: bool = True):
        """mask_only: whether the mask is all that hides keys, and a kernel reads nothing of it."""
        self.cells, self.blocks = cells, blocks
        self.narrow = mask_only and not blocks.keys_in_lanes
        self.order: list[tuple[Part, ...]] = []  # classes as they were found
        self.by_content: dict[bytes, tuple[Part, ...]] = {}
        self.one_tile_per_query = True  # of a pair of major blocks; see `Walk`
        # Keys that some query sees, as far as is known here.
        self.seen = cells.seen if mask_only else np.zeros_like(cells.seen)

    def tiles(self, i: int, j: int) -> dict[tuple[Part, ...], list[int]] | None:
        """The tiles of a pair of major blocks, by what is computed of them; None for too many."""
        cells, blocks = self.cells, self.blocks
        found: dict[tuple[Part, ...], list[int]] = {}
        rows_of_tile, width = blocks.block_q // LANES, blocks.block_kv // LANES
        first_column = j * blocks.major_kv // LANES
        columns = slice(first_column, first_column + blocks.major_kv // LANES)
        for tile in range(blocks.major_q // blocks.block_q):
            row = i * blocks.major_q // LANES + tile * rows_of_tile
            rows = slice(row, row + rows_of_tile)
            runs = [
                (first, min(first + width, stop))
                for start, stop in _runs((cells.state[rows, columns] != EMPTY).any(0))
                for first in range(start, stop, width)
            ]
            first_keys: tuple[Part, ...] = ()
            if len(runs) > 1 and runs[0] == (0, 1):
                first_keys = self._first_keys(rows, first_column)
                runs = runs[1:] if first_keys else runs
            queries = 0  # of the row of tiles that a part has
            for first, last in runs:
                parts = self.parts(rows, slice(first_column + first, first_column + last))
                if first_keys:
                    parts, first_keys = _joined(first_keys, parts), ()
                queries += sum(strip[0].q_stop - strip[0].q_start for strip in strips(parts))
                if parts:
                    if parts not in self.order:
                        # What needs no mask comes first.
                        plain = len(parts) == 1 and parts[0].band is None and not parts[0].masked
                        self.order.insert(0 if plain else len(self.order), parts)
                    found.setdefault(parts, []).append(tile << 16 | first)
                if len(self.order) > MOST_CLASSES:
                    return None
            real = min(cells.q_len - row * LANES, blocks.block_q)
            self.one_tile_per_query &= real <= 0 or (len(runs) == 1 and queries >= real)
        return found

    def _first_keys(self, rows: slice, column: int) -> tuple[Part, ...]:
        """Those of the first cell, where all queries see the same few: parts to be computed with
        another tile. None otherwise."""
        parts = self.parts(rows, slice(column, column + 1))
        few = all(part.band in (None, (None, None)) and part.kv_stop <= NARROW for part in parts)
        if (
            not few
            or self.blocks.keys_in_lanes
            or len(parts) * self.blocks.cut_q != self.blocks.block_q
        ):
            return ()
        return tuple(dataclasses.replace(part, place=self.blocks.block_kv) for part in parts)

    def parts(self, rows: slice, columns: slice) -> tuple[Part, ...]:
        cells = self.cells
        state, pattern = cells.state[rows, columns], cells.pattern[rows, columns]
        real = min(cells.q_len - rows.start * LANES, self.blocks.block_q)
        guarded = not self.seen[columns.start * LANES : columns.stop * LANES].all()
        content = (
            state.tobytes() + pattern.tobytes() + bytes([guarded, real % 256, max(real, 0) // 256])
        )
        if content not in self.by_content:
            self.by_content[content] = self._fit(cells.visible(rows, columns), real, guarded)
        return self.by_content[content]

    def _fit(self, visible: np.ndarray, real: int, guarded: bool) -> tuple[Part, ...]:
        """The parts of a tile, ``visible [keys, queries]``, whose first ``real`` queries exist."""
        blocks, num_kv = self.blocks, len(visible)
        if visible[:, :real].all():
            return (Part(0, blocks.block_q, 0, num_kv),)
        parts = []
        for q in range(0, real, blocks.cut_q):
            stop = min(q + blocks.cut_q, blocks.block_q)
            strip = visible[:, q : min(stop, real)]
            keys = np.nonzero(strip.any(1))[0]
            if not len(keys):
                continue
            begin, end = int(keys[0]), int(keys[-1]) + 1
            grain = GRAIN if end - begin <= NARROW and self.narrow else LANES
            part = Part(q, stop, begin // grain * grain, min(round_up(end, grain), num_kv))
            band, lead = _band_of(strip, q, begin, end), 0
            gap = guarded and not strip[begin:end].any(1).all()  # keys that nobody may see
            if band is None and begin == part.kv_start and not gap:
                lead = int(np.argmin(strip[begin:].all(1)))
                band = _band_of(strip, q, begin + lead, end)
            if band is None:
                start, last = begin // LANES * LANES, min(round_up(end), num_kv)
                part = Part(q, stop, start, last, masked=True, guarded=guarded)
                if end < last:  # the mask says nothing of keys that do not exist
                    part = dataclasses.replace(part, band=(None, None), seen=(start, end))
                parts.append(part)
                continue
            if band != (None, None):
                part = dataclasses.replace(part, band=band, lead=lead)
            if (begin, end) != (part.kv_start, part.kv_stop):
                part = dataclasses.replace(part, band=band, seen=(begin, end))
            parts.append(part)
        return tuple(parts)


def _joined(first_keys: tuple[Part, ...], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts strip by strip, each beside its first keys."""
    by_query = {part.q_start: part for part in first_keys}
    width = first_keys[0].q_stop - first_keys[0].q_start
    if len(parts) == 1 and parts[0].q_stop - parts[0].q_start > width:  # a whole tile, uncut
        (whole,) = parts
        parts = tuple(
            dataclasses.replace(whole, q_start=part.q_start, q_stop=part.q_stop)
            for part in first_keys
        )
    every = {part.q_start: part for part in parts}
    starts = sorted({*by_query, *every})
    return tuple(d[q] for q in starts for d in (by_query, every) if q in d)


def _band_of(strip: np.ndarray, q: int, begin: int, end: int):
    """The band that a strip of queries from ``q`` on shows of keys ``[begin, end)``, or None."""
    inner = strip[begin:end]
    if inner.all():
        return None, None
    difference = np.arange(begin, end)[:, None] - np.arange(q, q + strip.shape[1])
    low, high = int(difference[inner].min()), int(difference[inner].max())
    for band in ((None, high), (low, None), (low, high)):
        within = np.ones(inner.shape, bool)
        if band[0] is not None:
            within &= difference >= band[0]
        if band[1] is not None:
            within &= difference <= band[1]
        if (within == inner).all():
            return band
    return None


def _runs(live: np.ndarray):
    """``(start, stop)`` of the runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], live, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
