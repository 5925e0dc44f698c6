"""Runs found beside a mask's borders are those of every tile, at a fraction of the cost."""

import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.masks import mask_mod
from smalti.masks import runs as runs_module
from smalti.masks.mask_mod import as_mask
from smalti.masks.runs import find_runs, runs_by_rows, states_to_runs, transpose
from smalti.masks.tiles import TileGrid

BATCH, HEADS = 2, 3
INTS = st.integers(-30, 60)


@st.composite
def known_masks(draw, q_len: int, kv_len: int):
    """Any mask of the catalogue whose borders are known."""
    per_batch = st.one_of(INTS, st.lists(INTS, min_size=BATCH, max_size=BATCH).map(np.array))
    offset = draw(st.one_of(st.none(), per_batch))
    # Ascending ids, with padding anywhere, for each batch entry or for all.
    rows = draw(st.sampled_from([1, BATCH]))
    ids = []
    for length in (q_len, kv_len):
        some = np.sort(draw(st.integers(0, 2**32 - 1).map(_ids_of(rows, length))), 1)
        padding = draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, 12)), max_size=3))
        for start, width in padding:
            some[:, start : start + width] = -1
        ids.append(some.astype(np.int32))
    return draw(
        st.sampled_from(
            [
                masks.full(),
                masks.causal(offset),
                masks.sliding_window(draw(st.integers(1, 50)), offset),
                masks.local(draw(INTS), draw(INTS), 0 if offset is None else offset),
                masks.streaming(
                    sinks=draw(st.integers(0, 40)), window=draw(st.integers(1, 50)), offset=offset
                ),
                masks.prefix_lm(draw(per_batch), offset),
                masks.document(tuple(ids)),
                masks.lengths(q=draw(per_batch), kv=draw(st.one_of(st.none(), per_batch))),
            ]
        )
    )


def _ids_of(rows: int, length: int):
    return lambda seed: np.random.default_rng(seed).integers(0, 1 + seed % 9, (rows, length))


@st.composite
def grids_and_masks(draw):
    q_len, kv_len = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    blocks = draw(st.integers(1, q_len)), draw(st.integers(1, kv_len))
    one = known_masks(q_len, kv_len)
    tree = st.recursive(
        one,
        lambda inner: (
            inner.map(lambda m: ~m)
            | st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1])
            | st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1])
        ),
        max_leaves=4,
    )
    return TileGrid(BATCH, HEADS, q_len, kv_len, *blocks), draw(tree)


def bound(mask, grid: TileGrid):
    return mask.bind(grid.batch, grid.heads, grid.q_len, grid.kv_len)


def by_every_tile(mask, grid: TileGrid):
    """What `find_runs` must be: the states of all tiles, joined."""
    some, every = mask.classify(grid)
    return states_to_runs(runs_module.TileStates(some, every & some))


def assert_same(found, expected):
    """The same live runs in the same rows; there may be room for more."""
    for a, b in zip(_live(found), _live(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def _live(runs):
    start, stop, whole = (np.asarray(x) for x in runs)
    live = start < stop
    assert (live[..., :-1] >= live[..., 1:]).all(), "empty runs come last"
    return start.shape[:-1], *np.nonzero(live)[:-1], start[live], stop[live], whole[live]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(grids_and_masks())
def test_runs_are_those_of_every_tile(case):
    grid, mask = case
    mask = bound(mask, grid)
    assert mask.borders(grid) is not None
    assert_same(find_runs(mask, grid), by_every_tile(mask, grid))


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(grids_and_masks(), st.integers(1, 40))
def test_parts_of_rows_make_the_same_runs(case, together):
    grid, mask = case
    # Neither a function nor an array says where its borders are.
    mask = bound(mask & np.random.default_rng(0).random((grid.q_len, 1)).__lt__(0.7), grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs_module, "TOGETHER", together * BATCH * grid.num_kv)
        parts = list(runs_by_rows(mask, grid))
        found = find_runs(mask, grid)
    heights = [runs.start.shape[2] for _, runs in parts]
    assert [first for first, _ in parts] == [sum(heights[:i]) for i in range(len(heights))]
    assert sum(heights) == grid.num_q
    assert max(heights) <= together * BATCH  # for a mask that is the same for all entries
    assert_same(found, by_every_tile(mask, grid))


@pytest.mark.parametrize("pairs", [1, 60, 10**6])
def test_a_function_is_looked_at_a_few_tiles_at_a_time(monkeypatch, pairs):
    monkeypatch.setattr(mask_mod, "PAIRS_TOGETHER", pairs)
    grid = TileGrid(BATCH, HEADS, 23, 31, 4, 5)
    rows, keys = np.arange(23)[:, None], np.arange(31)
    found = find_runs(bound(as_mask(lambda b, h, q, k: (k <= q + b) & (k % 11 != h)), grid), grid)
    visible = [[(keys <= rows + b) & (keys % 11 != h) for h in range(HEADS)] for b in range(BATCH)]
    assert_same(found, by_every_tile(bound(as_mask(np.array(visible)), grid), grid))


def test_ids_out_of_order_are_looked_at_tile_by_tile():
    ids = np.repeat([3, 1, 2, 1], 8).astype(np.int32)
    grid = TileGrid(1, 1, 32, 32, 4, 4)
    mask = bound(masks.document(ids), grid)
    assert mask.borders(grid) is None
    assert_same(find_runs(mask, grid), by_every_tile(mask, grid))


@pytest.mark.parametrize(
    ("make", "value", "other"),
    [
        (lambda x: masks.causal(x), np.array([3, -4]), np.array([40, 1])),
        (lambda x: masks.streaming(sinks=3, window=9, offset=x), np.int32(2), np.int32(-7)),
        (lambda x: masks.lengths(q=x, kv=2 * x), np.array([5, 9]), np.array([0, 30])),
        (lambda x: masks.prefix_lm(x, 0) & ~masks.local(2, 3), np.array([5, 9]), np.array([0, 30])),
        (lambda x: masks.document(x), np.repeat([0, 1], 20), np.repeat([-1, 4], [3, 37])),
        (lambda x: lambda b, h, q, k: (k <= q) & (x[q] == x[k]), np.arange(40) // 9, np.arange(40)),
    ],
    ids=["offsets", "offset", "lengths", "prefix", "ids", "mask_mod"],
)
def test_other_values_of_traced_arrays_need_no_other_program(make, value, other):
    traces = []

    @jax.jit
    def traced(x):
        traces.append(x)
        block_mask: Any = masks.build_block_mask(make(x), 2, 1, 40, 7, 6)
        return block_mask.q_runs, block_mask.kv_runs

    for x in (value, other):
        known = masks.build_block_mask(make(jnp.asarray(x)), 2, 1, 40, 7, 6)
        q_runs, kv_runs = traced(x)
        assert_same(q_runs, known.q_runs)
        assert_same(kv_runs, known.kv_runs)
    assert len(traces) == 1


def test_traced_offsets_take_runs_and_no_tiles():
    grid = TileGrid(2, 1, 1 << 20, 1 << 20, 128, 128)
    shapes = jax.eval_shape(
        lambda x: find_runs(bound(masks.causal(x), grid), grid), jax.ShapeDtypeStruct((2,), "int32")
    )
    assert shapes.start.shape == (2, 1, 8192, 6)


def test_under_vmap_and_scan():
    offsets = jnp.array([[0, 3], [5, -2]])

    def runs(offset):
        return masks.build_block_mask(masks.causal(offset), 2, 1, 20, 4, 4).q_runs

    mapped = jax.vmap(runs)(offsets)
    _, scanned = jax.lax.scan(lambda carry, offset: (carry, runs(offset)), 0, offsets)
    for i, offset in enumerate(np.asarray(offsets)):
        for found in (mapped, scanned):
            assert_same(jax.tree.map(lambda x, i=i: x[i], found), runs(offset))


N = 1 << 20
DOCUMENTS = masks.document(lengths=[N // 8] * 8)


@pytest.mark.parametrize("tile", [128, 512])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.sliding_window(4096),
        masks.streaming(sinks=4, window=4096),
        masks.prefix_lm(10_000),
        DOCUMENTS,
        (masks.streaming(sinks=4, window=4096) & DOCUMENTS) | ~masks.local(99, N),
        masks.document(np.repeat(np.arange(8)[::-1], N // 8)),  # not in order
    ],
    ids=["causal", "window", "streaming", "prefix_lm", "document", "combination", "unordered"],
)
def test_a_million_tokens_need_little_memory(mask, tile):
    tracemalloc.start()
    try:
        block_mask = masks.build_block_mask(mask, 1, 1, N, tile, tile)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100e6
    for runs in (block_mask.q_runs, block_mask.kv_runs):
        assert runs.start.shape[2] == N // tile
        assert runs.start.shape[3] <= 4


def test_transposing_twice_changes_nothing():
    grid = TileGrid(2, 3, 300, 200, 7, 9)
    mask = bound(masks.streaming(sinks=20, window=40) | masks.lengths(q=np.array([30, 9])), grid)
    found = find_runs(mask, grid)
    assert_same(transpose(transpose(found, grid.num_kv), grid.num_q), found)
