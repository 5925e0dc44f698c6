"""Masks taken apart into what is known and what is not, and their tiles on a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.attention.tpu.plan import MOST_KNOWN_CLASSES, divisions, plan
from smalti.attention.tpu.tiles import Blocks, Walk
from smalti.masks import BlockMask, build_block_mask
from tests.attention.tpu.walks import check, ids, lists_of, visible_pairs, with_majors

SIZES = 2, 2, 500, 700
BLOCKS = Blocks(128, 256, 128, 256, 512)
DOCUMENTS = ids(2, 500, 0, low=0), ids(2, 700, 1, low=0)
PADDED = ids(2, 500, 0), ids(2, 700, 1)


def function(b, h, q, k):
    return (q + k) % 7 != 0


def per_head(b, h, q, k):
    return k <= q + 200 - 90 * h


def tables(b, h, q, k):
    return jnp.asarray(DOCUMENTS[0])[b, q] == jnp.asarray(DOCUMENTS[1])[b, k]


def divided(mask, sizes=SIZES):
    return list(divisions(mask.bind(*sizes), sizes))


# Of a mask, for each division, what is known and what is left, as the visible pairs of each.
DIVIDED = {
    "causal": (masks.causal(), [(masks.causal(), None), (None, masks.causal())]),
    "documents, causal": (
        masks.document(DOCUMENTS) & masks.causal(),
        [(masks.causal(), masks.document(DOCUMENTS)), (None, ...)],
    ),
    "three": (
        masks.document(DOCUMENTS) & (masks.causal() & masks.lengths(kv=np.array([3, 600]))),
        [
            (masks.causal(), masks.document(DOCUMENTS) & masks.lengths(kv=np.array([3, 600]))),
            (None, ...),
        ],
    ),
    "a function and a band": (
        masks.causal() & function,
        [(masks.causal() & function, None), (masks.causal(), masks.full() & function), (None, ...)],
    ),
    "two bands": (
        masks.causal() & masks.local(100, 10),
        [(masks.causal() & masks.local(100, 10), None), (None, ...)],
    ),
    "a function per head": (
        masks.sliding_window(100) & per_head,
        [(masks.sliding_window(100), masks.full() & per_head), (None, ...)],
    ),
    "or": (masks.causal() | masks.document(DOCUMENTS), [(None, ...)]),
    "not": (~masks.local(10, 10), [(~masks.local(10, 10), None), (None, ...)]),
    "not an and": (~(masks.causal() & masks.document(DOCUMENTS)), [(None, ...)]),
    "an or inside": (
        masks.causal() & (masks.local(30, 300) | masks.document(DOCUMENTS)),
        [(masks.causal(), masks.local(30, 300) | masks.document(DOCUMENTS)), (None, ...)],
    ),
    "by batch entry": (masks.causal(np.array([3, 5])), [(None, ...)]),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_known_of_a_mask(name):
    mask, expected = DIVIDED[name]
    found = divided(mask)
    whole = visible_pairs(mask.bind(*SIZES), SIZES)
    assert len(found) == len(expected)
    for division, (known, rest) in zip(found, expected, strict=True):
        if known is None:
            assert division.known is None
        else:
            assert division.known is not None
            queries, keys = np.ix_(np.arange(500), np.arange(700))
            sees = division.known.sees(queries, keys)
            np.testing.assert_array_equal(
                np.broadcast_to(sees, SIZES), visible_pairs(known.bind(*SIZES), SIZES)
            )
        if rest is None:
            assert division.rest is None
        else:
            rest = mask if rest is ... else rest
            assert division.rest is not None
            np.testing.assert_array_equal(
                visible_pairs(division.rest, SIZES), visible_pairs(rest.bind(*SIZES), SIZES)
            )
        check_plan(division, whole)


def check_plan(division, visible, blocks=BLOCKS, sizes=SIZES) -> Walk | None:
    walk = plan(division, sizes, blocks)
    if walk is not None:
        whole = division.rest is None
        evaluated = visible if whole else visible_pairs(division.rest, sizes)
        check(walk, sizes, visible, evaluated, exact=whole)
    return walk


EVEN = 2, 1, 512, 512  # whole tiles
OWN = np.stack([np.arange(512) // 256, np.arange(512) // 384]).astype(np.int32)


def test_traced_ids_leave_the_band_known():
    kept = []

    @jax.jit
    def trace(ids):
        found = divided(masks.document(ids) & masks.causal(), EVEN)
        kept.append([(x.known is not None, type(x.rest).__name__) for x in found])
        return plan(found[0], EVEN, BLOCKS)

    walk = trace(OWN)
    assert kept == [[(True, "Document"), (False, "And")]]
    mask = (masks.document(OWN) & masks.causal()).bind(*EVEN)
    visible = visible_pairs(mask, EVEN)
    found = check(walk, EVEN, visible, visible_pairs(masks.document(OWN), EVEN), exact=False)
    # Tiles that the band leaves empty are not visited, nor those of other documents.
    assert not found.computed[..., :128, 256:].any()
    assert found.computed.sum() < 0.7 * visible.size, "the band alone leaves three quarters"
    # And of those whose queries and keys are of one document the band alone is asked.
    assert (found.computed.astype(bool) & ~found.masked).any()
    known = plan(divided(mask, EVEN)[0], EVEN, BLOCKS)
    assert known is not None
    for a, b in zip(lists_of(walk), lists_of(known), strict=True):
        assert [x for x in a if x[1]] == [x for x in b if x[1]]


def test_known_classes_are_few():
    """A band of three kinds of tiles beside what is not known; of more, all is evaluated."""
    documents = masks.document(OWN)
    for mask, few in [(masks.causal(), True), (masks.sliding_window(300), False)]:
        first, last = divided(documents & mask, EVEN)
        assert first.known is not None
        visible = visible_pairs((documents & mask).bind(*EVEN), EVEN)
        walk = check_plan(first, visible, sizes=EVEN)
        assert (walk is not None) == few
        if walk is not None:
            bands = {tuple(part.band for part in c.parts) for c in walk.classes[0]}
            assert 2 <= len(bands) <= MOST_KNOWN_CLASSES
        assert check_plan(last, visible, sizes=EVEN) is not None


def bound_block_mask(mask) -> BlockMask:
    return build_block_mask(mask, *SIZES, BLOCKS.block_q, BLOCKS.block_kv)


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (masks.causal(), [True, False]),
        (masks.causal() & masks.local(100, 10), [True, False]),
        (masks.causal() & masks.document(DOCUMENTS), [False]),  # its tiles are its own
        (masks.document(DOCUMENTS), [False]),
        (masks.full() & per_head, [False]),
    ],
    ids=str,
)
def test_block_masks(mask, known):
    block_mask = bound_block_mask(mask)
    found = list(divisions(block_mask, SIZES))
    assert [x.known is not None for x in found] == known
    assert found[-1].rest is block_mask
    visible = visible_pairs(block_mask, SIZES)
    for division in found:
        assert check_plan(division, visible) is not None
    # Its tiles are those that it found, and no more.
    walk = plan(found[-1], SIZES, BLOCKS)
    assert walk is not None
    computed = check(walk, SIZES, visible, visible, exact=False).computed[..., ::128, ::256] > 0
    some = np.broadcast_to(block_mask.states().some, (2, 2, 4, 3))
    np.testing.assert_array_equal(computed[..., :4, :3], some)


def test_traced_block_masks_have_the_same_lists():
    block_mask = bound_block_mask(masks.document(DOCUMENTS) & masks.causal())

    @jax.jit
    def trace(ids):
        traced = bound_block_mask(masks.document(ids) & masks.causal())
        (division,) = divisions(traced, SIZES)
        return plan(division, SIZES, BLOCKS)

    walk = trace(DOCUMENTS)
    (division,) = divisions(block_mask, SIZES)
    known = plan(division, SIZES, BLOCKS)
    assert known is not None
    visible = visible_pairs(block_mask, SIZES)
    check(walk, SIZES, visible, visible, exact=False)
    for a, b in zip(lists_of(walk), lists_of(known), strict=True):
        assert [x for x in a if x[1]] == [x for x in b if x[1]]


def is_guarded(walk: Walk) -> bool:
    return any(part.guarded for part in walk.parts)


@pytest.mark.parametrize(
    ("mask", "guarded"),
    [
        (masks.document(ids(2, 512, 0, low=0)), False),
        (masks.document(ids(2, 512, 0, low=0)) & masks.causal(), False),
        (masks.document(ids(1, 512, 0, low=0)[0]) & masks.causal(), False),
        (masks.prefix_lm(np.array([3, 500])), False),
        (masks.document(ids(2, 512, 0)), True),
        (masks.document((ids(2, 512, 0, low=0), ids(2, 512, 5, low=0))), True),
        (masks.document(ids(2, 512, 0, low=0)) & masks.causal(offset=-1), True),
        (masks.lengths(kv=np.array([512, 200])), True),
        (masks.lengths(q=np.array([512, 200])) & masks.causal(), True),
    ],
    ids=str,
)
def test_keys_are_looked_for_where_nobody_may_see_them(mask, guarded):
    """They may be NaN. In self-attention without padding each is seen by its own query."""
    mask = mask.bind(*EVEN)
    visible = visible_pairs(mask, EVEN)
    unseen = not visible.any(2).all()
    assert guarded or not unseen
    for division in divisions(mask, EVEN):
        walk = check_plan(division, visible, Blocks(256, 256, 128, 256, 512), EVEN)
        assert walk is not None
        assert is_guarded(walk) == guarded


def test_a_traced_mask_guards_what_it_does_not_see():
    """Both kinds of tiles are there, and the lists say which is which."""
    mask = masks.document(PADDED).bind(*SIZES)

    @jax.jit
    def trace(ids):
        (division,) = divided(masks.document(ids))
        return plan(division, SIZES, BLOCKS)

    walk = trace(PADDED)
    visible = visible_pairs(mask, SIZES)
    found = check(walk, SIZES, visible, visible, exact=False)
    assert found.guarded.any()
    own = ids(2, 500, 0, low=0)

    @jax.jit
    def trace_own(ids):
        sizes = 2, 1, 500, 500
        (division,) = divided(masks.document(ids), sizes)
        return plan(division, sizes, BLOCKS)

    sizes = 2, 1, 500, 500
    visible = visible_pairs(masks.document(own), sizes)
    found = check(trace_own(own), sizes, visible, visible, exact=False)
    assert not found.guarded.any()
    assert found.masked.any()


@pytest.mark.parametrize(
    ("mask", "entries"),
    [
        (masks.document(ids(1, 600, 0)[0]), (1, 1)),
        (masks.document(ids(2, 600, 0)), (2, 1)),
        (masks.full() & per_head, (1, 2)),
        (masks.document(ids(2, 600, 0)) & per_head & masks.causal(), (2, 2)),
        (masks.causal(np.array([0, -200])), (2, 1)),
        (masks.sliding_window(100), (1, 1)),
    ],
    ids=str,
)
def test_lists_per_batch_entry_and_head(mask, entries):
    sizes = 2, 2, 600, 600
    mask = mask.bind(*sizes)
    visible = visible_pairs(mask, sizes)
    for division in divisions(mask, sizes):
        walk = check_plan(division, visible, sizes=sizes)
        if walk is None:
            continue
        assert walk.entries == entries
        pairs = walk.num_q * walk.num_kv
        assert walk.lists.shape[0] == entries[0] * entries[1] * pairs
        if walk.kv_fetch is not None:
            assert walk.kv_fetch.shape[0] == entries[0] * entries[1]


@pytest.mark.parametrize("majors", [(128, 256), (512, 768), (512, 256)], ids=str)
@pytest.mark.parametrize("name", ["documents, causal", "three", "a function per head", "or"])
def test_several_major_blocks(name, majors):
    mask, _ = DIVIDED[name]
    visible = visible_pairs(mask.bind(*SIZES), SIZES)
    for division in divided(mask):
        check_plan(division, visible, with_majors(*majors, blocks=BLOCKS))
