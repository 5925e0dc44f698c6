"""Which tiles are visited: every visible pair once, and no more is said of a tile than is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.attention.tpu.plan import Divided, divisions, plan
from smalti.attention.tpu.scores import _outside_band
from smalti.attention.tpu.tiles import Blocks, Part, TileClass, Walk, _next_live, strips
from tests.attention.tpu.walks import (
    BLOCKS,
    MAJORS,
    MASKS,
    NOTHING_HELD,
    SIZES,
    call_of,
    check,
    lists_of,
    shown_by,
    with_majors,
)

# Their tiles without a visible pair are not all known to be such.
INEXACT = ("documents", "documents, causal", "prefix", "local, nobody")


@pytest.mark.parametrize("majors", MAJORS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_each_visible_pair_is_in_one_tile(name, majors):
    blocks, (_, visible, every) = with_majors(*majors), call_of(name)
    for divided, evaluated in every:
        walk = plan(divided, SIZES, blocks)
        if walk is not None:
            exact = divided.rest is None or name not in INEXACT
            check(walk, SIZES, visible, evaluated, exact=exact)
    assert walk is not None, "the last can be planned"


@pytest.mark.parametrize("name", ["lengths, one", "two documents"])
def test_a_known_mask_need_not_be_evaluated(name):
    """It is not where that takes an array as large as all scores."""
    blocks, (_, visible, [(divided, _), *_]) = with_majors(1024, 1152), call_of(name)
    assert divided.rest is None
    walk = plan(divided, SIZES, blocks)
    assert walk is not None
    assert any(part.masked for part in walk.parts)
    walk = plan(divided, SIZES, blocks, may_evaluate=False)
    if walk is not None:
        check(walk, SIZES, visible, None)


@pytest.mark.parametrize("majors", MAJORS, ids=str)
@pytest.mark.parametrize("name", ["causal", "full", "function", "documents, causal", "lengths"])
def test_scores_that_may_hide_keys_leave_no_tile_whole(name, majors):
    blocks, (_, visible, every) = with_majors(*majors), call_of(name)
    for divided, evaluated in every:
        walk = plan(divided, SIZES, blocks, may_hide=True)
        if walk is not None:
            if divided.rest is None:  # a kernel looks at the scores, and has no mask
                evaluated = np.ones_like(visible)
            found = check(walk, SIZES, visible, evaluated, exact=name not in INEXACT)
            computed = found.computed > 0
            assert found.masked[computed].all()
            assert found.guarded[computed].all()
            assert walk.empty_rows


@pytest.mark.parametrize(
    "name", ["streaming", "documents", "documents, causal", "lengths", "lengths, window", "prefix"]
)
def test_traced_masks_have_the_same_lists(name):
    """Of the same division, that of a traced mask."""
    blocks = with_majors(512, 384)

    def walk_of(mask, known):
        return plan(Divided(known, mask), SIZES, blocks)

    for divided, _ in call_of(name).divided:
        known = walk_of(divided.rest, divided.known) if divided.rest is not None else None
        if known is None:
            continue
        assert isinstance(known.lists, np.ndarray)
        arrays = jax.tree.map(jnp.asarray, divided.rest)
        traced = jax.jit(lambda mask, known=divided.known: walk_of(mask, known))(arrays)
        for a, b in zip(lists_of(traced), lists_of(known), strict=True):
            # A class that no tile is in is left out, where that is known.
            assert [x for x in a if x[1]] == [x for x in b if x[1]]
        assert traced.pairs_by_q is traced.pairs_by_kv is None, "it visits all pairs"
        for name in ("kv_fetch", "q_fetch"):
            a, b = getattr(traced, name), getattr(known, name)
            assert a.dtype == b.dtype == traced.lists.dtype == known.lists.dtype == np.int32
            np.testing.assert_array_equal(a, b)
        assert traced.empty_rows >= known.empty_rows
        assert traced.empty_in_bands == known.empty_in_bands


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_what_a_part_hides_in_a_kernel(data):
    """By squares of 128, and only where one may hold an edge: the same as `Part` says."""

    def multiples(of, most):
        start = of * data.draw(st.integers(0, most // of - 1))
        return start, of * data.draw(st.integers(start // of + 1, most // of))

    q_start, q_stop = multiples(128, 512)
    kv_start, kv_stop = multiples(data.draw(st.sampled_from([16, 128])), 512)
    bound = st.none() | st.integers(-500, 500)
    lead = data.draw(st.just(0) | st.integers(0, kv_stop - kv_start))
    seen = data.draw(st.none() | st.tuples(st.integers(0, 140), st.integers(0, 140)))
    if seen is not None:
        seen = kv_start + seen[0], kv_stop - seen[1]
        seen = None if seen[0] >= seen[1] else seen
    band = data.draw(bound), data.draw(bound)
    part = Part(q_start, q_stop, kv_start, kv_stop, band=band, lead=lead, seen=seen)
    ones = np.ones((kv_stop - kv_start, q_stop - q_start), np.float32)
    with jax.disable_jit():
        kept = _outside_band(ones, part, band, 0.0)
    np.testing.assert_array_equal(np.asarray(kept) > 0, shown_by(part))


def test_what_is_held_where_nothing_is_needed():
    """Of a place without tiles the next that has some: what is copied early is not wasted."""
    rows = np.array(
        [[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    )
    expected = [[1, 1, 4, 4, 4, 4], [0] * 6, [0, 1, 2, 3, 4, 5], [5] * 6]
    np.testing.assert_array_equal(_next_live(rows.astype(bool), np), expected)
    np.testing.assert_array_equal(_next_live(jnp.asarray(rows, bool), jnp), expected)


@pytest.mark.parametrize("name", ["causal", "streaming", "documents, causal", "lengths", "nobody"])
def test_blocks_that_are_held(name):
    for divided, _ in call_of(name).divided:
        walk = plan(divided, SIZES, with_majors(256, 384))
        if walk is not None:
            check_held(walk)


def check_held(walk: Walk):
    lists = list(lists_of(walk))
    shape = walk.entries[0] * walk.entries[1], walk.num_q, walk.num_kv
    live = np.zeros(shape, bool)
    for entry, i, j in np.ndindex(shape):
        b, h = divmod(entry, walk.entries[1])
        live[entry, i, j] = any(tiles for _, tiles in lists[walk.list_index(b, h, i, j)])
    assert walk.kv_fetch.shape == shape
    assert walk.q_fetch.shape == (shape[0], walk.num_kv, walk.num_q)
    assert (walk.pairs_by_q is None) == (walk.pairs_by_kv is None) == live.all()
    for fetch, needed in ((walk.kv_fetch, live), (walk.q_fetch, live.swapaxes(1, 2))):
        place = np.broadcast_to(np.arange(needed.shape[2]), needed.shape)
        np.testing.assert_array_equal(fetch[needed], place[needed])
        assert (fetch >= 0).all()
        assert (fetch < needed.shape[2]).all()


def test_nothing_is_held_of_a_single_block():
    walk = plan(*_causal(1024), Blocks(256, 256, 256, 1024, 1024))
    assert walk is not None
    assert all(getattr(walk, name) is None for name in NOTHING_HELD)


def _causal(length: int):
    sizes = 1, 1, length, length
    return next(divisions(masks.causal().bind(*sizes), sizes)), sizes


def test_scores_are_counted_where_the_lists_are_known():
    whole = plan(*_causal(1024), Blocks(256, 256, 256, 1024, 1024))
    assert whole is not None
    assert whole.num_scores == 10 * 256 * 256  # of 16 tiles
    halves = plan(*_causal(1024), Blocks(256, 256, 128, 1024, 1024))
    assert halves is not None
    assert halves.num_scores == (10 * 256 - 4 * 64) * 256  # of the diagonal, three quarters
    sizes = 1, 1, 8, 8
    mask = masks.streaming(sinks=1, window=2).bind(*sizes)
    on_grid = plan(Divided(None, mask), sizes, BLOCKS)
    assert on_grid is not None
    assert on_grid.num_scores is None


def walk_of(entries, lists: int) -> Walk:
    """Over 2 by 3 pairs of major blocks."""
    blocks = Blocks(128, 128, 128, 128, 128)
    classes = ((TileClass((Part(0, 128, 0, 128),), None),),)
    return Walk(
        lists=np.zeros((lists, 1, 2)), **NOTHING_HELD, classes=classes, blocks=blocks,
        q_len=200, kv_len=300, entries=entries, empty_rows=False, empty_in_bands=False,
    )  # fmt: skip


@pytest.mark.parametrize("entries", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_every_entry_and_pair_of_blocks_has_its_own_list(entries):
    walk = walk_of(entries, 6 * entries[0] * entries[1])
    found = np.array([walk.list_index(*place) for place in np.ndindex(2, 4, 2, 3)])
    found = found.reshape(2, 4, 2, 3)
    own = found[: entries[0], : entries[1]]
    np.testing.assert_array_equal(own.reshape(-1), np.arange(own.size))
    assert (found == own).all(), "entries that share a walk share its lists"


def test_one_list_for_all():
    walk = walk_of((1, 1), 1)
    assert {walk.list_index(*place) for place in np.ndindex(2, 4, 2, 3)} == {0}
    assert (walk.q_padded, walk.kv_padded) == (256, 384)


def test_parts_of_a_strip_and_where_their_scores_are():
    first = Part(0, 128, 0, 16, band=(None, None), seen=(0, 5), place=256)
    parts = (first, Part(0, 128, 128, 256), Part(128, 256, 0, 256))
    assert strips(parts) == [parts[:2], parts[2:]]
    assert [part.rows for part in parts] == [slice(256, 272), slice(128, 256), slice(0, 256)]
    blocks = Blocks(256, 256, 128, 256, 256)
    classes = ((TileClass(parts, 1),),)
    walk = Walk(
        lists=None, **NOTHING_HELD, classes=classes, blocks=blocks, q_len=256, kv_len=256,
        entries=(1, 1), empty_rows=False, empty_in_bands=False,
    )  # fmt: skip
    assert walk.tile_shape == (272, 256)
    assert walk.parts == set(parts)
    assert walk.num_scores == 128 * (16 + 128 + 256)
