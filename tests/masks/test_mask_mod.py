"""Combinators, user functions and arrays: elementwise right, and never wrong about a tile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.masks.mask_mod import as_mask
from smalti.masks.tiles import TileGrid, TileIndex

from . import brute

GRID = TileGrid(2, 3, 7, 9, block_q=3, block_kv=2)


def all_cases(grid):
    cases = brute.catalogue_cases(grid) | brute.general_cases(grid)
    # Bound once, so that a function is traced and compiled once.
    return {
        name: brute.Case(case.mask.bind(*brute.shape(grid)), case.visible)
        for name, case in cases.items()
    }


CASES = {size: all_cases(brute.GRIDS[size]) for size in ("7x9", "12x5")}
NAMES = sorted(CASES["7x9"])
GENERAL = sorted(brute.general_cases(GRID))

# A mask written as a tree: a name, ("~", tree), ("&", tree, tree) or ("|", tree, tree).
TREES = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.tuples(st.just("~"), inner) | st.tuples(st.sampled_from("&|"), inner, inner),
    max_leaves=5,
)


def build(tree, cases):
    """The mask of a tree, and its elements by NumPy's operators."""
    if isinstance(tree, str):
        return cases[tree].mask, cases[tree].visible
    operator, *parts = tree
    (mask, visible), *rest = (build(part, cases) for part in parts)
    if operator == "~":
        return ~mask, ~visible
    ((other, other_visible),) = rest
    if operator == "&":
        return mask & other, visible & other_visible
    return mask | other, visible | other_visible


@pytest.mark.parametrize("size", CASES)
def test_combinations_mean_their_logic_and_no_tile_is_called_wrong(size):
    grid = brute.GRIDS[size]

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(TREES)
    def check(tree):
        mask, visible = build(tree, CASES[size])
        np.testing.assert_array_equal(brute.evaluate(mask, grid), visible)
        some, every = brute.tiles_of(visible, grid)
        found_some, found_every = brute.states_of(mask, grid)
        assert not (some & ~found_some).any(), "a tile with a visible pair was called empty"
        assert not (found_every & ~every).any(), "a tile with a hidden pair was called whole"
        by_batch, by_head = mask.bind(*brute.shape(grid)).varies()
        assert by_batch or (visible == visible[:1]).all()
        assert by_head or (visible == visible[:, :1]).all()

    check()


@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize("name", [n for n in GENERAL if "document" not in n])
def test_functions_and_arrays_are_classified_exactly(name, size):
    grid, case = brute.GRIDS[size], CASES[size][name]
    np.testing.assert_array_equal(brute.evaluate(case.mask, grid), case.visible)
    for found, expected in zip(
        brute.states_of(case.mask, grid), brute.tiles_of(case.visible, grid), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["causal(offset [B])", "document", "lengths(kv=3)", *GENERAL])
def test_one_tile_of_a_mask_is_that_part_of_it(name):
    """For neighbouring and for scattered key tiles, ragged ones included."""
    mask, visible = CASES["7x9"][name].mask, CASES["7x9"][name].visible
    mask = (~(~mask & masks.full())).bind(*brute.shape(GRID)).pad_to(9, 10)
    for tiles in ([1], [0, 4, 2]):
        index = TileIndex(1, 1, 6, jnp.array(tiles), num_b=1, num_h=2, block_q=3, block_kv=2)
        found = np.asarray(mask.tile(index))
        assert found.shape[2:] == (3, 2 * len(tiles))
        keys = np.concatenate([np.arange(2 * t, 2 * t + 2) for t in tiles])
        real = keys < 9  # what lies past the end may be anything
        np.testing.assert_array_equal(
            np.broadcast_to(found, (1, 2, *found.shape[2:]))[:, :, :1, real],
            visible[1:, 1:, 6:7, keys[real]],
        )


def test_functions_and_arrays_combine_from_either_side():
    function = lambda b, h, q, k: q == k  # noqa: E731
    array = np.eye(4, dtype=bool)
    grid = TileGrid(1, 1, 4, 4, 2, 2)
    for other in (function, array, jnp.asarray(array)):
        for mask, expected in (
            (masks.causal() & other, array),
            (masks.causal() | other, np.tri(4, dtype=bool)),
            (masks.causal() & ~as_mask(other), np.tri(4, k=-1, dtype=bool)),
        ):
            np.testing.assert_array_equal(brute.evaluate(mask, grid)[0, 0], expected)
    for mask, expected in (
        (function & masks.causal(), array),
        (function | masks.causal(), np.tri(4, dtype=bool)),
    ):
        np.testing.assert_array_equal(brute.evaluate(mask, grid)[0, 0], expected)


@pytest.mark.parametrize(
    "combine",
    [
        lambda: masks.causal() and masks.full(),
        lambda: masks.causal() or masks.full(),
        lambda: not masks.causal(),
    ],
)
def test_python_words_do_not_combine_masks(combine):
    with pytest.raises(
        TypeError, match=re.escape("Use `&`, `|` and `~`, e.g. `causal() & document(ids)`.")
    ):
        combine()


def test_a_function_that_captures_traced_arrays_is_the_same_under_jit():
    limit = jnp.array([3, 6], jnp.int32)

    def states(limit):
        mask = masks.causal() & (lambda b, h, q, k: k < limit[b])
        block_mask = masks.build_block_mask(mask, *brute.shape(GRID), 3, 2)
        return tuple(block_mask.states())

    known, traced = states(limit), jax.jit(states)(limit)
    assert all(isinstance(x, np.ndarray) for x in known)
    for x, y in zip(known, traced, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_function_that_captures_known_arrays_is_known_inside_jit():
    table = jnp.arange(9)

    @jax.jit
    def call(x):
        mask = as_mask(lambda b, h, q, k: table[k] <= q).bind(*brute.shape(GRID))
        some, every = mask.classify(GRID)
        assert isinstance(some, np.ndarray)
        assert isinstance(every, np.ndarray)
        return x

    call(0.0)


@pytest.mark.parametrize(
    ("function", "varies"),
    [
        (lambda b, h, q, k: q >= k, (False, False)),
        (lambda b, h, q, k: q >= k + b, (True, False)),
        (lambda b, h, q, k: q >= k * h, (False, True)),
        (lambda b, h, q, k: (b == 0) | (h == 0), (True, True)),
    ],
)
def test_a_function_varies_with_what_it_reads(function, varies):
    mask = as_mask(function).bind(2, 3, 4, 4)
    assert mask.varies() == varies
    some, _ = mask.classify(TileGrid(2, 3, 4, 4, 2, 2))
    assert some.shape[:2] == (2 if varies[0] else 1, 3 if varies[1] else 1)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (np.zeros((4, 4), np.float32), "mask: got an array of dtype float32; a mask array is bool"),
        (np.zeros((1, 1, 1, 4, 4), bool), "mask: got 5 dimensions; at most 4, broadcasting to"),
        (
            masks.causal,
            "mask: got the function causal itself; call it: mask=smalti.masks.causal(…).",
        ),
        ("causal", "A mask written as text goes through smalti.masks.parse(…)."),
        (3, "mask: got 3 of type int; allowed are a mask of smalti.masks"),
    ],
)
def test_what_is_no_mask_gets_advice(mask, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        as_mask(mask)
    with pytest.raises(ValueError, match=re.escape(text)):
        masks.causal() & mask


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            np.zeros((2, 1, 5, 4), bool),
            "mask: the boolean array has shape (2, 1, 5, 4), which does not fit [B, Hq, Sq, Sk] = "
            "[2, 3, 4, 4]. Each dimension must be that size or 1.",
        ),
        (
            lambda b, h, q, k: q >= k and b == 0,
            "mask_mod: it branches on the value of an index or score. It is traced elementwise, "
            "so use `&`, `|`, `~` and jnp.where instead of `and`, `or`, `not` and `if`.",
        ),
        (
            lambda b, h, q, k: q - k,
            "mask_mod: for scalar arguments it must return one scalar, boolean; it returned (int32",
        ),
        (
            lambda b, h, q, k: jnp.zeros(3, bool),
            "mask_mod: for scalar arguments it must return one scalar, boolean; it returned (bool[",
        ),
        (lambda q, k: q >= k, "mask_mod: it must take (b, h, q_idx, kv_idx); calling it gave:"),
    ],
)
def test_a_mask_that_does_not_fit_says_so_when_bound(mask, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        as_mask(mask).bind(2, 3, 4, 4)


def test_combinations_are_written_as_they_are_made():
    def diagonal(b, h, q_idx, kv_idx):
        return q_idx == kv_idx

    mask = (masks.causal() & ~masks.sliding_window(2)) | diagonal
    assert repr(mask) == "((causal() & ~sliding_window(2)) | mask_mod(diagonal))"
    assert repr(as_mask(np.zeros((2, 1, 4, 4), bool))) == "array[2, 1, 4, 4]"
