"""Runs of tiles: how a mask's live tiles are found, kept and transposed.

A run is ``[start, stop)`` in key tiles, all whole (every pair visible, no mask needed) or all cut
(the mask decides by element). What is in no run is empty and is never touched. Runs grow with the
number of borders in a mask, not with Sq × Sk; neither does anything here where a mask says what
its borders are: it is then asked about the tiles beside a border only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from smalti.masks.mask_mod import CUT, EMPTY, WHOLE, Mask, TileStates
from smalti.masks.tiles import SomeTiles, TileGrid, Tiles, is_known

# Tiles that are looked at together where the mask is known: a few times as many bytes.
TOGETHER = 1 << 21


class TileRuns(NamedTuple):
    """Runs of live tiles, row by row; a row's runs come in ascending order.

    NumPy where the mask is known at trace time, else traced. ``R`` is the most runs that a row has
    (traced: could have). Rows with fewer end in runs with ``start == stop``.
    """

    start: Any  # int32 [1 or B, 1 or H, rows, R], first tile
    stop: Any  # int32 like start, one past the last tile
    whole: Any  # bool like start: no mask needed inside


def find_runs(mask: Mask, grid: TileGrid) -> TileRuns:
    """The runs of a bound mask: what `Mask.classify` says of each tile, neighbours joined."""
    parts = [runs for _, runs in runs_by_rows(mask, grid)]
    if len(parts) == 1:
        return parts[0]
    most = max(part.start.shape[-1] for part in parts)
    fill = (grid.num_kv, grid.num_kv, False)
    return TileRuns(
        *(
            np.concatenate([_widened(x, most, value) for x in arrays], axis=2)
            for arrays, value in zip(zip(*parts, strict=True), fill, strict=True)
        )
    )


def runs_by_rows(mask: Mask, grid: TileGrid) -> Iterator[tuple[int, TileRuns]]:
    """`find_runs` in parts of so many rows as need little memory; each with its first row."""
    if not is_known(mask):
        yield 0, _runs(mask, grid)
        return
    by_batch, by_head = mask.varies()
    copies = (grid.batch if by_batch else 1) * (grid.heads if by_head else 1)
    one = SomeTiles(grid, grid.q_tiles[:, :, :1], grid.kv_tiles)
    borders = mask.borders(one)
    per_row = grid.num_kv if borders is None else 2 * sum(x.shape[-1] for x in borders) + 2
    step = max(1, TOGETHER // (copies * per_row))
    for first in range(0, grid.num_q, step):
        rows = grid.q_tiles[:, :, first : first + step]
        yield first, _runs(mask, SomeTiles(grid, rows, grid.kv_tiles))


def _runs(mask: Mask, tiles: Tiles) -> TileRuns:
    """Asks about the tiles at a border and joins what lies between them."""
    borders = mask.borders(tiles)
    if borders is None:
        return _join(mask.classify(tiles), tiles.kv_tiles, tiles.grid.num_kv)
    grid = tiles.grid
    xp: Any = np if all(isinstance(x, np.ndarray) for x in borders) else jnp
    # A border is in a tile or at one of its ends: that tile may be of its own state, and so may the
    # next. The last may be ragged.
    near = [x // grid.block_kv + more for x in borders for more in (0, 1)]
    ends = np.array([0, grid.num_kv - 1], np.int32)[None, None, None, :]
    lead = np.broadcast_shapes(*(x.shape[:-1] for x in (*near, ends)))
    near = [xp.broadcast_to(x, (*lead, x.shape[-1])) for x in (*near, ends)]
    places = xp.sort(xp.clip(xp.concatenate(near, -1), 0, grid.num_kv - 1), -1).astype(np.int32)
    return _join(mask.classify(SomeTiles(grid, tiles.q_tiles, places)), places, grid.num_kv)


def states_to_runs(states: TileStates) -> TileRuns:
    """Join neighbouring tiles of equal state into runs."""
    num = states.some.shape[-1]
    return _join(states, np.arange(num, dtype=np.int32)[None, None, None, :], num)


def _join(states: TileStates, places: Any, num: int) -> TileRuns:
    """Runs of rows of ``num`` tiles, each of the state of the last place at or before it.

    Places ascend from 0 and may repeat.
    """
    known = all(isinstance(x, np.ndarray) for x in (*states, places))
    xp: Any = np if known else jnp
    some, every, places = xp.broadcast_arrays(*states, places)
    state = xp.where(some, xp.where(every, WHOLE, CUT), EMPTY).astype(np.int8)
    edge = xp.full((*state.shape[:-1], 1), EMPTY, np.int8)
    begins = (state != EMPTY) & (state != xp.concatenate([edge, state[..., :-1]], -1))
    ends = (state != EMPTY) & (state != xp.concatenate([state[..., 1:], edge], -1))
    after = xp.concatenate([places[..., 1:], xp.full_like(edge, num, dtype=np.int32)], -1)
    if known:
        row = np.flatnonzero(begins) // state.shape[-1]
        runs = places[begins], after[ends], state[begins] == WHOLE
        return _rows_of(row, *runs, lead=state.shape[:-1], num=num)
    # Tiles that begin (end) a run, first; the others are pushed past them and become empty runs.
    start = xp.sort(xp.where(begins, places, num), -1)
    stop = xp.sort(xp.where(ends, after, num + 1), -1)
    stop = xp.where(start == num, num, stop)
    order = xp.argsort(~begins, axis=-1, stable=True)
    whole = xp.take_along_axis(begins & (state == WHOLE), order, -1)
    return TileRuns(start.astype(np.int32), stop.astype(np.int32), whole)


def _rows_of(row, start, stop, whole, *, lead: tuple[int, ...], num: int) -> TileRuns:
    """`TileRuns` of a flat list of runs, in the order of their rows; ``row`` counts over lead."""
    counts = np.bincount(row, minlength=int(np.prod(lead)))
    most = max(int(counts.max()), 1)
    place = np.arange(row.size) - (np.cumsum(counts) - counts)[row]
    found = []
    for values, fill, dtype in ((start, num, np.int32), (stop, num, np.int32), (whole, 0, bool)):
        array = np.full((counts.size, most), fill, dtype)
        array[row, place] = values
        found.append(array.reshape(*lead, most))
    return TileRuns(*found)


def _widened(array, most: int, value):
    return np.pad(array, [(0, 0)] * 3 + [(0, most - array.shape[-1])], constant_values=value)


def runs_to_states(runs: TileRuns, num: int) -> TileStates:
    """The inverse of `states_to_runs`, over rows of ``num`` tiles."""
    known = isinstance(runs.start, np.ndarray)
    lead = runs.start.shape[:-1]
    row = np.arange(np.prod(lead, dtype=int)).reshape(*lead, 1)

    def inside(counts):
        # +1 where a run begins, −1 past its end; summed up, 1 inside of it.
        if known:
            steps = np.zeros((row.size, num + 1), np.int8)
            np.add.at(steps, (row, runs.start), counts.astype(np.int8))
            np.subtract.at(steps, (row, runs.stop), counts.astype(np.int8))
        else:
            steps = jnp.zeros((row.size, num + 1), np.int32)
            steps = steps.at[row, runs.start].add(counts.astype(np.int32))
            steps = steps.at[row, runs.stop].add(-counts.astype(np.int32))
        return steps[:, :num].cumsum(-1, dtype=steps.dtype).reshape(*lead, num) > 0

    live = runs.start < runs.stop
    return TileStates(inside(live), inside(live & runs.whole))


def transpose(runs: TileRuns, num: int) -> TileRuns:
    """Per key tile, of which there are ``num``, the runs of query tiles.

    Where runs are known this takes memory in proportion to them and to the result: a key tile's
    runs begin and end where a row differs from the row before it.
    """
    if not isinstance(runs.start, np.ndarray):
        some, every = runs_to_states(runs, num)
        return states_to_runs(TileStates(some.swapaxes(-1, -2), every.swapaxes(-1, -2)))
    batch, heads, rows, _ = runs.start.shape
    live = runs.start < runs.stop
    plane, row = np.divmod(np.flatnonzero(live) // runs.start.shape[-1], rows)
    line = plane * (rows + 1) + row  # past a plane's last row there is an empty one
    start, stop = runs.start[live], runs.stop[live]
    state = np.where(runs.whole[live], WHOLE, CUT).astype(np.int8)

    # On each line, the states of its row (now) and of the row before it, as sums of steps, which
    # begin at EMPTY, 0.
    line = np.concatenate([line, line, line + 1, line + 1])
    place = np.concatenate([start, stop, start, stop])
    none = np.zeros_like(state)
    now, before = np.concatenate([state, -state, none, none, none, none, state, -state]).reshape(
        2, -1
    )
    order = np.lexsort((place, line))
    line, place = line[order], place[order]
    now, before = (np.cumsum(x[order], dtype=np.int8) for x in (now, before))
    differs = now[:-1] != before[:-1]
    width = np.where(differs, place[1:] - place[:-1], 0)  # 0 at a line's end, where both sums are 0

    # Each column in which they differ begins its next state there.
    line, state = np.repeat(line[:-1], width), np.repeat(now[:-1], width)
    begin = place[:-1] - (np.cumsum(width) - width)
    column = np.repeat(begin, width) + np.arange(line.size)
    plane, row = np.divmod(line, rows + 1)
    column = plane * num + column
    order = np.lexsort((row, column))
    column, row, state = column[order], row[order], state[order]
    live = np.flatnonzero(state != EMPTY)  # a column's last state is empty: the next one ends it
    flat = column[live], row[live], row[live + 1], state[live] == WHOLE
    return _rows_of(*flat, lead=(batch, heads, num), num=rows)


def live_runs(runs: TileRuns, batch: int = 0, head: int = 0):
    """One entry's live runs, flat: ``row, start, stop, whole``, each ``[n]`` and NumPy."""
    start, stop, whole = (np.asarray(x)[batch, head] for x in runs)
    row, place = np.nonzero(start < stop)
    return row, start[row, place], stop[row, place], whole[row, place]
