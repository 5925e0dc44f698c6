"""The grid of tiles and one step's place in it."""

import jax.numpy as jnp
import numpy as np
import pytest

from smalti.masks.tiles import TileGrid, TileIndex, as_known, reduce_tiles

from . import brute


@pytest.mark.parametrize("size", brute.GRIDS)
def test_tiles_cover_every_index_once(size):
    grid = brute.GRIDS[size]
    for first, last, count, length in (
        (grid.q_first, grid.q_last, grid.num_q, grid.q_len),
        (grid.kv_first, grid.kv_last, grid.num_kv, grid.kv_len),
    ):
        assert first.size == last.size == count
        assert first.dtype == last.dtype == np.int32
        covered = [
            i for a, b in zip(first.ravel(), last.ravel(), strict=True) for i in range(a, b + 1)
        ]
        assert covered == list(range(length))
    assert grid.q_first.shape == (1, 1, grid.num_q, 1)
    assert grid.kv_first.shape == (1, 1, 1, grid.num_kv)


def test_a_step_knows_its_indices():
    index = TileIndex(1, 4, 6, jnp.array([3, 0]), num_b=2, num_h=3, block_q=2, block_kv=4)
    assert index.b.tolist() == [1, 2]
    assert index.h.tolist() == [4, 5, 6]
    assert index.q_idx.tolist() == [6, 7]
    assert index.num_kv == 8
    assert index.kv_idx.tolist() == [12, 13, 14, 15, 0, 1, 2, 3]


@pytest.mark.parametrize("wide", [(1, 1, 1, 1), (3, 7, 8, 16), (1, 7, 1, 16), (3, 1, 8, 1)])
def test_a_step_slices_arrays_that_broadcast(wide):
    index = TileIndex(1, 4, 6, jnp.array([3, 0]), num_b=2, num_h=3, block_q=2, block_kv=4)
    array = np.arange(np.prod(wide)).reshape(wide)
    found = np.broadcast_to(index.slice(jnp.asarray(array)), (2, 3, 2, 8))
    full = np.broadcast_to(array, (3, 7, 8, 16))
    expected = full[np.ix_([1, 2], [4, 5, 6], [6, 7], [12, 13, 14, 15, 0, 1, 2, 3])]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("size", brute.GRIDS)
def test_any_and_all_over_tiles_ignore_what_does_not_exist(size, xp):
    grid = brute.GRIDS[size]
    visible = np.random.default_rng(0).random(brute.shape(grid)) < 0.5
    some, every = brute.tiles_of(visible, grid)
    args = (xp.asarray(visible), grid.block_q, grid.block_kv)
    np.testing.assert_array_equal(reduce_tiles(*args, every=False), some)
    np.testing.assert_array_equal(reduce_tiles(*args, every=True), every)


def test_the_last_tile_is_ragged():
    grid = TileGrid(1, 1, 7, 9, 3, 4)
    assert (grid.num_q, grid.num_kv) == (3, 3)
    assert grid.q_last.ravel().tolist() == [2, 5, 6]
    assert grid.kv_last.ravel().tolist() == [3, 7, 8]


def test_known_values_become_numpy():
    assert isinstance(as_known(jnp.arange(3)), np.ndarray)
    assert isinstance(as_known(3), np.ndarray)
