"""Which tiles are visited: every visible pair once, and no more is said of a tile than is true."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.attention.tpu import masking
from smalti.attention.tpu.tiles import (
    Blocks,
    Walk,
    _next_live,
    band_parts,
    cut_parts,
    plan,
    whole_parts,
)
from smalti.tpu.lanes import LANES

BLOCKS = Blocks(256, 384, 128, 512, 768)  # strips narrower than a tile


def band_pairs(band, q_len: int, kv_len: int) -> np.ndarray:
    """bool ``[Sq, Sk]``: ``low ≤ key − query ≤ high``."""
    low, high = band
    difference = np.arange(kv_len)[None, :] - np.arange(q_len)[:, None]
    visible = np.ones((q_len, kv_len), bool)
    if low is not None:
        visible &= difference >= low
    if high is not None:
        visible &= difference <= high
    return visible


@st.composite
def bands(draw, reach: int):
    """Bands whose edges come near a tile, with no bound, none visible, and one diagonal too."""
    bound = st.none() | st.integers(-reach, reach)
    kind = draw(st.sampled_from(["any", "diagonal", "window", "window"]))
    if kind == "any":
        return draw(bound), draw(bound)
    high = draw(st.integers(-reach, reach))
    return high - (0 if kind == "diagonal" else draw(st.integers(1, reach))), high


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_parts_of_a_tile_at_the_edge_of_a_band(data):
    block_q, block_kv = (128 * data.draw(st.integers(1, 4)) for _ in range(2))
    cut_q = data.draw(st.sampled_from([n for n in (128, 256) if block_q % n == 0]))
    blocks = Blocks(block_q, block_kv, cut_q, block_q, block_kv)
    num_q, num_kv = data.draw(st.integers(1, block_q)), data.draw(st.integers(1, block_kv))
    distance = 128 * data.draw(st.integers(-6, 6))
    band = data.draw(bands(1000))
    check_parts(band, distance, num_q, num_kv, blocks)


@pytest.mark.parametrize("num_q", [1, 127, 128, 129, 256])
@pytest.mark.parametrize("num_kv", [1, 128, 255, 383, 384])
@pytest.mark.parametrize("band", [(None, 0), (-40, 0), (None, None), (5, None), (-300, 200)])
def test_parts_of_ragged_tiles(band, num_q, num_kv):
    for distance in (-384, -128, 0, 256):
        check_parts(band, distance, num_q, num_kv, BLOCKS)


def check_parts(band, distance: int, num_q: int, num_kv: int, blocks: Blocks):
    parts = band_parts(band, distance, num_q, num_kv, blocks)
    # Queries that do not exist may see anything; keys that do not exist are seen by nobody.
    low, high = (None if x is None else x - distance for x in band)
    shape = blocks.block_q, blocks.block_kv
    visible = band_pairs((low, high), *shape) & (np.arange(shape[1]) < num_kv)
    real = np.arange(shape[0])[:, None] < num_q
    covered, shown = np.zeros(shape, int), np.zeros(shape, bool)
    for part in parts:
        assert part.kv_start % LANES == part.kv_stop % LANES == 0
        assert 0 <= part.q_start < part.q_stop <= shape[0]
        assert 0 <= part.kv_start < part.kv_stop <= shape[1]
        assert not part.masked
        here = part.queries, part.keys
        covered[here] += 1
        shown[here] = True if part.band is None else band_pairs(part.band, *shape)[here]
        keys = np.arange(shape[1])
        first, stop = (0, shape[1]) if part.seen is None else part.seen
        if part.seen is not None:
            assert part.band is not None, "what is not seen must be hidden"
            shown[here] &= (keys < stop)[None, part.keys]  # as `scores.hide` does
        # By real queries of the part, or, where it has none, of the tile.
        rows = slice(0, num_q) if part.q_start >= num_q else part.queries
        seen = (visible & real)[rows].any(0)
        assert not seen[(keys < first) | (keys >= stop)].any(), "a key that is seen is taken away"
        # Keys of the part that no query sees may be NaN, so they must be in no range.
        assert seen[max(first, part.kv_start) : min(stop, part.kv_stop)].all()
    assert covered.max(initial=0) <= 1
    assert (covered > 0)[visible & real].all()
    assert (shown == visible)[np.broadcast_to(real, shape) & (covered > 0)].all()
    if parts == whole_parts(blocks):
        assert (visible | ~real).all()
    if not (visible & real).any():
        assert not parts


def lists_of(walk: Walk):
    """For every list, the tiles of each class: (parts, [(query tile, key tile), …])."""
    for n, row in enumerate(np.asarray(walk.lists)[:, 0]):
        counts, tiles = iter(row[: walk.num_counts]), row[walk.num_counts :]
        at, classes = 0, []
        for tile_class in walk.classes[n if len(walk.classes) > 1 else 0]:
            count = int(next(counts)) if tile_class.count is None else tile_class.count
            places = [(int(t) >> 16, int(t) & 0xFFFF) for t in tiles[at : at + count]]
            classes.append((tile_class.parts, places))
            at += count
        yield classes


def pairs_visited(walk: Walk, batch: int):
    """int ``[B, Sq padded, Sk padded]``: how often a pair is computed; and bool: how often without
    the mask being asked."""
    blocks = walk.blocks
    shape = batch, walk.q_padded, walk.kv_padded
    computed, whole = np.zeros(shape, int), np.zeros(shape, int)
    lists = list(lists_of(walk))
    for b in range(batch):
        for i in range(walk.num_q):
            for j in range(walk.num_kv):
                for parts, tiles in lists[walk.list_index(b, i, j)]:
                    for q_tile, kv_tile in tiles:
                        q = i * blocks.major_q + q_tile * blocks.block_q
                        kv = j * blocks.major_kv + kv_tile * blocks.block_kv
                        for part in parts:
                            here = (
                                b,
                                slice(q + part.q_start, q + part.q_stop),
                                slice(kv + part.kv_start, kv + part.kv_stop),
                            )
                            computed[here] += 1
                            whole[here] += not part.masked and part.band is None
    return computed, whole


def visible_pairs(mask, batch: int, q_len: int, kv_len: int) -> np.ndarray:
    b, h, q, kv = np.ix_(range(batch), range(1), range(q_len), range(kv_len))
    return np.broadcast_to(np.asarray(mask(b, h, q, kv)), (batch, 1, q_len, kv_len))[:, 0]


def ids(batch: int, length: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).integers(-1, 4, (batch, length)), 1).astype(np.int32)


MASKS = {
    "full": masks.full,
    "causal": masks.causal,
    "causal, empty rows": lambda: masks.causal(offset=-300),
    "window": lambda: masks.sliding_window(200),
    "local": lambda: masks.local(150, 70),
    "local, nobody": lambda: masks.local(-5, 4),
    "local, far away": lambda: masks.local(150, 70, offset=5000),
    "streaming": lambda: masks.streaming(sinks=5, window=100),
    "documents": lambda: masks.document((ids(2, 700, 0), ids(2, 900, 1))),
    "lengths": lambda: masks.lengths(q=np.array([700, 100]), kv=np.array([0, 517])),
    "prefix": lambda: masks.prefix_lm(np.array([300, 0])) & ~masks.local(10, 10),
    "nobody": lambda: ~masks.full(),
}
# One major block for all, one for each tile, several tiles in each of several, and all keys in one.
MAJORS = [(1024, 1152), (256, 384), (512, 768), (256, 1152)]


@pytest.mark.parametrize("majors", MAJORS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_each_visible_pair_is_in_one_tile(name, majors):
    batch, q_len, kv_len = 2, 700, 900
    blocks = dataclasses.replace(BLOCKS, major_q=majors[0], major_kv=majors[1])
    mask = MASKS[name]().bind(batch, 1, q_len, kv_len)
    walk = plan(mask, masking.band(mask), batch, q_len, kv_len, blocks)
    visible = visible_pairs(mask, batch, q_len, kv_len)
    computed, whole = pairs_visited(walk, batch)
    assert computed.max(initial=0) <= 1
    assert (computed[:, :q_len, :kv_len] == 1)[visible].all()
    assert visible[whole[:, :q_len, :kv_len] == 1].all()
    assert not whole[:, :q_len, kv_len:].any(), "keys that do not exist are taken for seen"
    assert walk.empty_rows or visible.any(-1).all()
    # No tile without a visible pair is visited, where the mask knows of all such.
    live = np.zeros((batch, walk.q_padded, walk.kv_padded), bool)
    live[:, :q_len, :kv_len] = visible
    size = blocks.block_q, blocks.block_kv
    by_tile = live.reshape(batch, -1, size[0], live.shape[2] // size[1], size[1])
    dead = ~np.repeat(np.repeat(by_tile.any((2, 4)), size[0], 1), size[1], 2)
    if name not in ("documents", "prefix", "local, nobody"):
        assert not computed[dead].any()


@pytest.mark.parametrize("name", ["streaming", "documents", "lengths", "prefix"])
def test_traced_masks_have_the_same_lists(name):
    blocks = dataclasses.replace(BLOCKS, major_q=512, major_kv=384)

    def walk(mask):
        return plan(mask, None, 2, 700, 900, blocks)

    mask = MASKS[name]().bind(2, 1, 700, 900)
    known = walk(mask)
    assert isinstance(known.lists, np.ndarray)
    traced = jax.jit(walk)(jax.tree.map(jnp.asarray, mask))
    for a, b in zip(jax.tree.leaves(traced), jax.tree.leaves(known), strict=True):
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(traced) == jax.tree.structure(known)


def test_scores_that_may_hide_keys_leave_no_tile_whole():
    mask = masks.full().bind(1, 1, 512, 768)
    walk = plan(mask, masking.band(mask), 1, 512, 768, BLOCKS, may_hide=True)
    computed, whole = pairs_visited(walk, 1)
    assert (computed == 1).all()
    assert not whole.any()
    assert all(p.masked for p in cut_parts(BLOCKS))


def test_what_is_held_where_nothing_is_needed():
    """Of a place without tiles the next that has some: what is copied early is not wasted."""
    rows = np.array(
        [[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    )
    expected = [[1, 1, 4, 4, 4, 4], [0] * 6, [0, 1, 2, 3, 4, 5], [5] * 6]
    np.testing.assert_array_equal(_next_live(rows.astype(bool), np), expected)
    np.testing.assert_array_equal(_next_live(jnp.asarray(rows, bool), jnp), expected)


@pytest.mark.parametrize("name", ["causal", "documents", "lengths", "nobody"])
def test_blocks_that_are_held(name):
    blocks = dataclasses.replace(BLOCKS, major_q=256, major_kv=384)
    mask = MASKS[name]().bind(2, 1, 700, 900)
    walk = plan(mask, masking.band(mask), 2, 700, 900, blocks)
    lists = list(lists_of(walk))
    entries = 2 if walk.per_batch else 1
    shape = entries, walk.num_q, walk.num_kv
    live = [any(n for _, n in lists[walk.list_index(*place)]) for place in np.ndindex(shape)]
    live = np.reshape(live, shape)
    assert walk.kv_fetch.shape == shape
    assert walk.q_fetch.shape == (entries, walk.num_kv, walk.num_q)
    for fetch, needed in ((walk.kv_fetch, live), (walk.q_fetch, live.swapaxes(1, 2))):
        place = np.broadcast_to(np.arange(needed.shape[2]), needed.shape)
        np.testing.assert_array_equal(fetch[needed], place[needed])
        assert (fetch >= 0).all()
        assert (fetch < needed.shape[2]).all()


def test_scores_are_counted_where_the_lists_are_known():
    mask = masks.causal().bind(1, 1, 1024, 1024)
    blocks = Blocks(256, 256, 256, 1024, 1024)
    walk = plan(mask, masking.band(mask), 1, 1024, 1024, blocks)
    assert walk.num_scores == 10 * 256 * 256  # of 16 tiles
    traced = plan(masks.streaming(sinks=1, window=2).bind(1, 1, 8, 8), None, 1, 8, 8, blocks)
    assert traced.num_scores is None
