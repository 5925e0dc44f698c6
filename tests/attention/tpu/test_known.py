"""Masks that are known: their cells, and tiles cut to measure."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.attention.tpu.known import MOST_CLASSES, Planner, find_cells, plan_known
from smalti.attention.tpu.tiles import Blocks, Part
from tests.attention.tpu.walks import (
    KNOWN,
    SIZES,
    call_of,
    cells_of,
    check,
    lists_of,
    visible_pairs,
    visits,
    with_majors,
)

RAGGED = [(1, 1), (128, 128), (127, 129), (300, 200), (130, 640)]


def cells_known(mask, q_len: int, kv_len: int):
    sizes = 1, 1, q_len, kv_len
    mask = mask.bind(*sizes)
    cells = find_cells(mask, sizes)
    assert cells is not None
    return cells, visible_pairs(mask, sizes)


@pytest.mark.parametrize("name", KNOWN)
def test_cells_say_what_the_mask_says(name):
    mask, visible, _ = call_of(name)
    cells = find_cells(mask, SIZES)
    assert cells is not None
    check_cells(cells, visible[0, 0])
    looked_at = cells_of(visible[0, 0])
    # The mask's own states may say less than looking does, never something else.
    assert (cells.state == looked_at.state)[cells.state != 1].all()
    assert len(np.unique(cells.patterns, axis=0)) == len(cells.patterns)


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_cells_of_ragged_sequences(sizes):
    for mask in (masks.full(), masks.causal(), masks.causal(-7), masks.lengths(q=120, kv=126)):
        cells, visible = cells_known(mask, *sizes)
        check_cells(cells, visible[0, 0])


def check_cells(cells, visible):
    q_len, kv_len = visible.shape
    queries, keys = np.ix_(np.arange(q_len), np.arange(kv_len))
    np.testing.assert_array_equal(cells.sees(queries, keys), visible)
    rows, columns = cells.state.shape
    every = cells.visible(slice(0, rows), slice(0, columns))
    assert every.shape == (columns * 128, rows * 128)
    np.testing.assert_array_equal(every[:kv_len, :q_len], visible.T)
    assert not every[kv_len:].any(), "keys that do not exist are seen"
    part = cells.visible(slice(rows - 1, rows), slice(columns // 2, columns))
    np.testing.assert_array_equal(part, every[columns // 2 * 128 :, (rows - 1) * 128 :])


def test_what_has_no_cells():
    assert find_cells(masks.causal(np.array([1, 2])).bind(*SIZES), SIZES) is None  # by batch entry
    per_head = (masks.full() & (lambda b, h, q, k: h > 0)).bind(2, 2, 8, 8)
    assert find_cells(per_head, (2, 2, 8, 8)) is None
    noise = np.random.default_rng(0).random((700, 1300)) < 0.5  # no two cells are alike
    sizes = 1, 1, *noise.shape
    mask = (masks.full() & noise).bind(*sizes)
    assert find_cells(mask, sizes) is None
    long = 1, 1, 2**18, 2**18
    assert find_cells(masks.causal().bind(*long), long) is None


TILES = [
    (Blocks(128, 128, 128, 512, 1024), 300, 500),
    (Blocks(256, 128, 256, 256, 1024), 500, 900),
    (Blocks(512, 1024, 256, 512, 1024), 512, 1024),
    (Blocks(512, 1024, 256, 1024, 2048), 1024, 2048),
    (Blocks(256, 512, 128, 512, 512), 700, 900),
    (Blocks(384, 640, 128, 384, 1280), 700, 1280),
    (Blocks(512, 256, 256, 1536, 1024), 1400, 1000),
]
SHAPES = {
    "full": masks.full(),
    "causal": masks.causal(),
    "causal, from the left": masks.causal(offset=0),
    "window": masks.sliding_window(200),
    "local": masks.local(150, 70),
    "streaming": masks.streaming(sinks=5, window=150),
    "streaming, many": masks.streaming(sinks=70, window=300),
    "prefix": masks.prefix_lm(200),
    "keys in the middle": masks.full() & (lambda b, h, q, k: (k >= 100) & (k < 290)),
    "nobody": ~masks.full(),
}


@pytest.mark.parametrize("number", range(len(TILES)))
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_of_all_sizes(name, number):
    blocks, q_len, kv_len = TILES[number]
    cells, visible = cells_known(SHAPES[name], q_len, kv_len)
    for keys_in_lanes in (False, True):
        walk = plan_known(cells, dataclasses.replace(blocks, keys_in_lanes=keys_in_lanes))
        if walk is None:  # too many kinds: first keys, alone and beside the window
            assert name.startswith("streaming")
        else:
            check_known(walk, visible)


def check_known(walk, visible):
    """Where it evaluates a mask, that is the whole mask."""
    return check(walk, visible.shape, visible, visible)


@st.composite
def patterns(draw, most: int):
    """Masks with edges anywhere: bands, first keys, lengths, holes, and keys that nobody sees."""
    q_len, kv_len = draw(st.integers(1, most)), draw(st.integers(1, most))
    query, key = np.ix_(np.arange(q_len), np.arange(kv_len))
    first = key < draw(st.sampled_from([0, 1, 5, 64, 65, 130]))
    kind = draw(st.sampled_from(["band", "streaming", "streaming", "block"]))
    if kind == "block":  # that some strips see whole
        rows, columns = (128 * draw(st.integers(1, 4)) for _ in range(2))
        height = draw(st.sampled_from([128, 256]))
        visible = first | ((key >= columns) & (query // height == rows // height))
    else:
        low, high = (draw(st.none() | st.integers(-most, most)) for _ in range(2))
        if kind == "streaming":  # some way off the first keys
            high = draw(st.integers(-100, 400))
            low = high - draw(st.integers(0, 200))
            first = first & (key - query <= high)
        band = np.ones((q_len, kv_len), bool)
        if low is not None:
            band &= key - query >= low
        if high is not None:
            band &= key - query <= high
        visible = band | first
    edge = st.integers(0, most)
    for token, cut in ((-key, -draw(edge) // 2), (key, draw(edge)), (query, draw(edge))):
        if draw(st.integers(0, 2)) == 0:
            visible &= token < cut
    if draw(st.integers(0, 3)) == 0:
        start = draw(edge)
        visible &= (key < start) | (key > start + draw(st.integers(0, 200)))
    return visible


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_tiles_of_any_pattern(data):
    visible = data.draw(patterns(620))
    block_q, block_kv = (128 * data.draw(st.integers(1, n)) for n in (4, 5))
    cut_q = 256 if block_q % 256 == 0 and data.draw(st.booleans()) else 128
    major_q = block_q * data.draw(st.integers(1, 3))
    major_kv = block_kv * data.draw(st.integers(1, 5))
    blocks = Blocks(
        block_q, block_kv, cut_q, major_q, major_kv, keys_in_lanes=data.draw(st.booleans())
    )
    walk = plan_known(cells_of(visible), blocks)
    if walk is not None:
        check_known(walk, visible[None, None])


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "blocks", "alone"),
    [
        (masks.full(), 500, 1000, Blocks(512, 1024, 256, 512, 1024), True),
        (masks.causal(), 1024, 1024, Blocks(512, 1024, 256, 1024, 1024), True),
        (masks.causal(), 1024, 2048, Blocks(512, 1024, 256, 1024, 2048), False),
        (masks.causal(), 1024, 2048, Blocks(512, 1024, 256, 1024, 1024), False),
        (masks.sliding_window(256), 2048, 2048, Blocks(512, 1024, 256, 2048, 2048), True),
        (masks.sliding_window(640), 2048, 2048, Blocks(512, 1024, 256, 2048, 2048), False),
        (masks.streaming(sinks=4, window=99), 1024, 1024, Blocks(512, 1024, 256, 1024, 1024), True),
        (masks.causal(offset=-1), 512, 512, Blocks(512, 512, 256, 512, 512), True),
        (masks.causal(offset=-256), 512, 512, Blocks(512, 512, 256, 512, 512), False),
        (~masks.full(), 100, 100, Blocks(128, 128, 128, 128, 128), False),
    ],
    ids=str,
)  # fmt: skip
def test_queries_that_meet_all_of_their_keys_at_once(mask, q_len, kv_len, blocks, alone):
    cells, visible = cells_known(mask, q_len, kv_len)
    walk = plan_known(cells, blocks)
    assert walk is not None
    assert walk.one_tile_per_query is alone
    check_known(walk, visible)
    if alone:  # also queries that see nothing: nobody else writes their results
        assert (visits(walk, 1, 1).in_strips[..., :q_len] == 1).all()


@pytest.mark.parametrize(
    ("sinks", "rows"), [(4, 16), (16, 16), (40, 48), (48, 48), (64, 64)], ids=lambda x: str(x)
)
def test_first_keys_are_computed_beside_a_window(sinks, rows):
    """Where the window of `masks.streaming` has left them behind, as a narrow part of its tiles."""
    blocks = Blocks(512, 1024, 256, 4096, 4096)
    cells, visible = cells_known(masks.streaming(sinks=sinks, window=512), 4096, 4096)
    walk = plan_known(cells, blocks)
    assert walk is not None
    assert walk.one_tile_per_query
    check_known(walk, visible)
    tiles = [places for classes in lists_of(walk) for _, places in classes]
    assert sum(map(len, tiles)) == 8, "one for each 512 queries"
    narrow = {part for part in walk.parts if part.place is not None}
    some = {} if sinks == rows else {"band": (None, None), "seen": (0, sinks)}
    expected = {Part(q, q + 256, 0, rows, place=1024, **some) for q in (0, 256)}
    assert narrow == expected
    assert walk.tile_shape == (1024 + rows, 512)
    assert walk.first_keys == rows
    # A register of keys is not cut up: they are tiles of their own, and need sums.
    in_lanes = plan_known(cells, dataclasses.replace(blocks, keys_in_lanes=True))
    assert in_lanes is not None
    assert not in_lanes.one_tile_per_query
    assert not any(part.place for part in in_lanes.parts)
    check_known(in_lanes, visible)


def test_first_keys_beside_keys_that_one_strip_sees():
    """The other strips do not see them."""
    query, key = np.ix_(np.arange(512), np.arange(1024))
    for strip in (0, 1):
        visible = (key < 4) | ((query // 256 == strip) & (key >= 512))
        walk = plan_known(cells_of(visible), Blocks(512, 1024, 256, 512, 1024))
        assert walk is not None
        assert any(part.place is not None for part in walk.parts)
        check_known(walk, visible[None, None])


def test_first_keys_in_the_tile_of_the_window():
    """All see them, and the band beside them: no mask is needed."""
    cells, visible = cells_known(masks.streaming(sinks=4, window=100), 512, 512)
    blocks = Blocks(256, 512, 256, 512, 512)
    walk = plan_known(cells, blocks)
    assert walk is not None
    check_known(walk, visible)
    assert Part(0, 256, 0, 512, band=(-99 + 256, 256), lead=4) in walk.parts
    # Without the first queries nobody sees the keys between: they may hold NaN.
    last = dataclasses.replace(
        cells, state=cells.state[2:], pattern=cells.pattern[2:], q_len=256
    )  # fmt: skip
    walk = plan_known(last, blocks)
    assert walk is not None
    check_known(walk, visible[:, :, 256:])


def test_too_many_kinds_of_tiles():
    query, key = np.ix_(np.arange(1280), np.arange(1280))
    blocks = Blocks(128, 256, 128, 1280, 1280)
    steps = key - query <= 13 * (query // 128)  # each row of tiles has its own edge
    assert plan_known(cells_of(steps), blocks) is None
    few = key - query <= 13 * (query // 512)
    walk = plan_known(cells_of(few), blocks)
    assert walk is not None
    assert 3 <= max(map(len, walk.classes)) <= MOST_CLASSES
    check_known(walk, few[None, None])


def test_documents():
    """Of all lengths they are of too many kinds; of a multiple of 128 of few."""
    lengths = np.random.default_rng(0).integers(40, 200, 60).tolist()
    sizes = 1, 1, sum(lengths), sum(lengths)
    mask = masks.document(lengths=lengths).bind(*sizes)
    assert find_cells(mask, sizes) is None
    cells, visible = cells_known(masks.document(lengths=[640, 256, 640, 384]), 1920, 1920)
    walk = plan_known(cells, Blocks(128, 256, 128, 1920, 2048))
    assert walk is not None
    assert not any(part.masked for part in walk.parts)
    check_known(walk, visible)


@pytest.mark.parametrize("name", KNOWN)
def test_queries_that_see_nothing_are_known(name):
    visible = call_of(name).visible[0, 0]
    planner = Planner(cells_of(visible), with_majors(1024, 1152))
    assert planner.cells.empty_rows == (not visible.any(-1).all())
    np.testing.assert_array_equal(planner.seen[: visible.shape[1]], visible.any(0))
    assert not planner.seen[visible.shape[1] :].any()
