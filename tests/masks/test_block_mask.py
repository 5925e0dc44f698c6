"""A BlockMask: runs of tiles, what they say of each, and their transpose."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import smalti
from smalti import masks
from smalti.masks import build_block_mask
from smalti.masks.mask_mod import TileStates
from smalti.masks.runs import runs_to_states, states_to_runs, transpose
from smalti.masks.tiles import TileGrid

from . import brute

GRID = brute.GRIDS["7x9"]


def build(mask, grid):
    return build_block_mask(mask, *brute.shape(grid), grid.block_q, grid.block_kv)


def states_of(state):
    """0 empty, 1 cut, 2 whole, as `TileStates`."""
    return TileStates(state > 0, state == 2)


STATES = hnp.arrays(
    np.int8,
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 4), st.integers(1, 8)),
    elements=st.integers(0, 2),
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(STATES)
def test_runs_say_the_same_as_tiles_and_are_few(state):
    num = state.shape[-1]
    runs = states_to_runs(states_of(state))
    some, every = runs_to_states(runs, num)
    np.testing.assert_array_equal(some, state > 0)
    np.testing.assert_array_equal(every, state == 2)

    assert runs.start.dtype == runs.stop.dtype == np.int32
    assert runs.whole.dtype == bool
    live = runs.start < runs.stop
    assert (live[..., :-1] >= live[..., 1:]).all(), "empty runs come last"
    assert not (runs.whole & ~live).any()
    start, stop, whole = (x.reshape(-1, x.shape[-1]) for x in runs)
    for row in zip(start, stop, whole, strict=True):
        found = [(a, b, w) for a, b, w in zip(*row, strict=True) if a < b]
        for (_, stop_1, whole_1), (start_2, _, whole_2) in itertools.pairwise(found):
            assert stop_1 <= start_2, "runs ascend and do not overlap"
            assert stop_1 < start_2 or whole_1 != whole_2, "neighbours of one state are one run"
    # No more than the row with the most borders needs.
    padded = np.concatenate([np.zeros((*state.shape[:-1], 1), np.int8), state], -1)
    borders = ((padded[..., 1:] > 0) & (padded[..., 1:] != padded[..., :-1])).sum(-1).max()
    assert runs.start.shape == (*state.shape[:-1], max(borders, 1))

    expected = states_to_runs(states_of(state.swapaxes(-1, -2)))
    for found, wanted in zip(transpose(runs, num), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype


def test_traced_states_make_the_same_runs_padded_with_empty_ones():
    state = np.random.default_rng(0).integers(0, 3, (2, 3, 5, 7)).astype(np.int8)
    known = states_to_runs(states_of(state))
    traced = jax.jit(lambda state: states_to_runs(states_of(state)))(state)
    most = known.start.shape[-1]
    assert traced.start.shape[-1] == 7
    np.testing.assert_array_equal(traced.start[..., :most], known.start)
    np.testing.assert_array_equal(traced.stop[..., :most], known.stop)
    np.testing.assert_array_equal(traced.whole[..., :most], known.whole)
    assert (np.asarray(traced.start == traced.stop)[..., most:]).all()


@pytest.mark.parametrize("size", brute.GRIDS)
def test_a_block_mask_and_its_transpose_hold_every_live_tile(size):
    grid = brute.GRIDS[size]
    for name, case in brute.catalogue_cases(grid).items():
        block_mask = build(case.mask, grid)
        some, every = brute.states_of(case.mask, grid)
        tiles = (grid.batch, grid.heads, grid.num_q, grid.num_kv)
        for states in (
            block_mask.states(),
            [x.swapaxes(-1, -2) for x in runs_to_states(block_mask.kv_runs, grid.num_q)],
        ):
            for found, expected in zip(states, (some, every & some), strict=True):
                np.testing.assert_array_equal(
                    np.broadcast_to(found, tiles), expected, err_msg=f"{name}"
                )


def test_a_block_mask_of_traced_arrays_is_the_known_one():
    cases = {name: case.mask for name, case in brute.catalogue_cases(GRID).items()}
    traced = jax.jit(
        lambda cases: {
            name: (
                tuple(block_mask.states()),
                tuple(runs_to_states(block_mask.kv_runs, GRID.num_q)),
            )
            for name, mask in cases.items()
            for block_mask in [build(mask, GRID)]
        }
    )({name: cases[name] for name in ("causal(offset [B])", "document", "lengths(q, kv)")})
    for name, (states, transposed) in traced.items():
        known = build(cases[name], GRID)
        for found, expected in zip(states, known.states(), strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=name)
        for found, expected in zip(
            transposed, runs_to_states(known.kv_runs, GRID.num_q), strict=True
        ):
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_tiles_are_found_once_where_entries_and_heads_agree():
    assert build(masks.causal(), GRID).q_runs.start.shape[:2] == (1, 1)
    assert build(masks.causal(np.array([1, 2])), GRID).q_runs.start.shape[:2] == (2, 1)
    assert build(lambda b, h, q, k: q >= k + h, GRID).q_runs.start.shape[:2] == (1, 3)


def test_causal_is_a_whole_run_and_a_cut_tile():
    runs = build_block_mask(masks.causal(), 1, 1, 6, 6, 2, 2).q_runs
    assert runs.start[0, 0].tolist() == [[0, 3], [0, 1], [0, 2]]
    assert runs.stop[0, 0].tolist() == [[1, 3], [1, 2], [2, 3]]
    assert runs.whole[0, 0].tolist() == [[False, False], [True, False], [True, False]]


def test_a_block_mask_passes_through_jit():
    given = build(masks.lengths(kv=np.array([3, 9])), GRID)
    same = jax.jit(lambda block_mask: block_mask)(given)
    assert same.grid == given.grid
    for found, expected in zip(same.states(), given.states(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_it_is_written_with_its_sizes():
    assert repr(build(jnp.ones((7, 9), bool), GRID)) == (
        "BlockMask(array[1, 1, 7, 9], q_len=7, kv_len=9, block_q=3, block_kv=2)"
    )


def local_causal_mask(b, h, q, k, window=512):
    return (k <= q) & (k >= q - window + 1)


def test_the_call_of_the_article():
    block_mask = smalti.build_block_mask(local_causal_mask, 2, 4, 1024, 128, 64)
    assert isinstance(block_mask, smalti.BlockMask)
    assert block_mask.grid == TileGrid(2, 4, 1024, 1024, 128, 64)
    expected = build(masks.sliding_window(512), block_mask.grid)
    for found, wanted in zip(block_mask.q_runs, expected.q_runs, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(block_mask.kv_runs, expected.kv_runs, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((8, 8, 4, 2), {}),
        ((8, 4, 2), {}),
        ((8, 8), {"block_q": 4, "block_kv": 2}),
        ((8,), {"block_q": 4, "block_k": 2}),
        ((), {"seqlen": 8, "block_q": 4, "block_k": 2}),
        ((), {"seqlen": 8, "block_q": 4, "block_kv": 2}),
        ((), {"q_len": 8, "kv_len": 8, "block_q": 4, "block_kv": 2}),
        (tuple(np.array([8, 8, 4, 2])), {}),
    ],
)
def test_sizes_are_given_in_either_form(sizes, named):
    make: Any = build_block_mask
    grid = make(masks.causal(), 1, 1, *sizes, **named).grid
    assert grid == TileGrid(1, 1, 8, 8, 4, 2)
    assert all(type(n) is int for n in dataclasses.astuple(grid))


@pytest.mark.parametrize(
    ("sizes", "named", "said"),
    [
        ((8, 8, 4, 2, 1), {}, "got 5 sizes after heads"),
        ((8,), {}, "block_q and block_kv missing"),
        ((), {"q_len": 8, "block_q": 4, "block_k": 2}, "kv_len missing"),
        ((8, 4, 2), {"block_q": 4}, "got block_q twice"),
        ((8, 4, 2), {"kv_len": 4}, "got both seqlen and kv_len"),
        ((8, 8, 4, 2), {"seqlen": 8}, "got both seqlen and q_len"),
        ((8, 8), {"block_q": 4, "block_k": 2, "block_kv": 2}, "got both block_k and block_kv"),
        ((8, 4, 2), {"blok_q": 4}, "got an unknown argument 'blok_q'"),
    ],
)
def test_a_mixture_of_forms_shows_both(sizes, named, said):
    make: Any = build_block_mask
    with pytest.raises(TypeError, match=re.escape(said)) as raised:
        make(masks.causal(), 1, 1, *sizes, **named)
    assert "q_len, kv_len, block_q, block_kv)" in str(raised.value)
    assert "seqlen, block_q, block_k)" in str(raised.value)


@pytest.mark.parametrize("name", ["batch", "heads", "q_len", "kv_len", "block_q", "block_kv"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_a_wrong_size_is_named(name, size):
    sizes = dict.fromkeys(("batch", "heads", "q_len", "kv_len", "block_q", "block_kv"), 4)
    with pytest.raises(
        ValueError, match=re.escape(f"{name}: got {size!r}; it must be an int of at least 1.")
    ):
        build_block_mask(masks.causal(), **{**sizes, name: size})


@pytest.mark.parametrize("name", ["seqlen", "block_q", "block_k"])
def test_a_wrong_size_has_the_name_that_it_was_given(name):
    sizes = {**dict.fromkeys(("seqlen", "block_q", "block_k"), 4), name: 0}
    with pytest.raises(ValueError, match=f"^{name}: got 0; it must be"):
        build_block_mask(masks.causal(), 1, 1, **sizes)
    make: Any = build_block_mask
    with pytest.raises(ValueError, match=f"^{name}: got 0; it must be"):
        make(masks.causal(), 1, 1, *sizes.values())


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=re.escape("does not fit [B, Hq, Sq, Sk] = [2, 3, 7, 9]")):
        build(np.ones((9, 7), bool), GRID)


@pytest.mark.parametrize(
    "combine",
    [
        lambda x: ~x,
        lambda x: x & masks.causal(),
        lambda x: masks.causal() | x,
        lambda x: x & x,
        lambda x: x | local_causal_mask,
        lambda x: local_causal_mask & x,
        lambda x: np.ones((7, 9), bool) & x,
        lambda x: np.ones((7, 9), bool) | x,
        lambda x: x | jnp.ones((7, 9), bool),
        lambda x: jnp.ones((7, 9), bool) & x,
    ],
)
def test_a_block_mask_is_not_combined(combine):
    said = r"^mask: BlockMask\(.*\) cannot be combined .* `&`, `\|` and `~` first"
    with pytest.raises(ValueError, match=said):
        combine(build(masks.causal(), GRID))
