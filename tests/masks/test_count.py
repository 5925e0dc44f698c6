"""Counts are those of a drawing made element by element."""

import jax
import numpy as np
import pytest

from smalti import masks
from smalti.masks import build_block_mask, count

from . import brute


@pytest.mark.parametrize("size", ["7x9", "12x5"])
def test_counts_are_those_of_each_tile_and_pair(size):
    grid = brute.GRIDS[size]
    cases = brute.catalogue_cases(grid) | brute.general_cases(grid)
    areas = np.minimum(np.arange(1, grid.num_q + 1) * grid.block_q, grid.q_len)
    heights = np.diff(areas, prepend=0)
    widths = np.diff(
        np.minimum(np.arange(1, grid.num_kv + 1) * grid.block_kv, grid.kv_len), prepend=0
    )
    for name, case in cases.items():
        block_mask = build_block_mask(case.mask, *brute.shape(grid), grid.block_q, grid.block_kv)
        some, every = (x[1, 2] for x in brute.states_of(case.mask, grid))
        found = count(block_mask, batch=1, head=2)
        assert found.whole == (some & every).sum(), name
        assert found.cut == (some & ~every).sum(), name
        assert found.live == some.sum(), name
        assert found.empty == (~some).sum(), name
        assert found.pairs_visible == case.visible[1, 2].sum(), name
        assert found.pairs_live == (some * heights[:, None] * widths).sum(), name
        assert found.pairs == grid.q_len * grid.kv_len, name


def test_causal_saves_nearly_half():
    found = count(build_block_mask(masks.causal(), 1, 1, 1 << 18, 128, 128))
    n = (1 << 18) // 128
    assert (found.whole, found.cut, found.empty) == (n * (n - 1) // 2, n, n * (n - 1) // 2)
    assert found.saved == 0.5 - 0.5 / n
    assert found.saved_by_pair == 0.5 - 0.5 / (1 << 18)


def test_an_entry_that_there_is_not():
    block_mask = build_block_mask(masks.causal(), 2, 3, 8, 4, 4)
    assert count(block_mask, 1, 2) == count(block_mask)
    with pytest.raises(ValueError, match="batch: got 2; there are 2, from 0"):
        count(block_mask, 2)
    with pytest.raises(ValueError, match="batch: got 'x'; there are 2, from 0"):
        count(block_mask, "x")  # pyright: ignore
    with pytest.raises(ValueError, match="head: got -1; there are 3, from 0"):
        count(block_mask, 0, -1)


def test_traced_tiles_are_not_known():
    @jax.jit
    def traced(offset):
        count(build_block_mask(masks.causal(offset), 1, 1, 8, 4, 4))

    with pytest.raises(ValueError, match="block_mask: its arrays are traced"):
        traced(3)


@pytest.mark.parametrize("ask", [count, masks.show, lambda x: masks.draw(x, "a.png")])
@pytest.mark.parametrize("given", [masks.causal(), masks.causal, np.ones((8, 8), bool), None])
def test_a_mask_by_itself_has_no_tiles(ask, given):
    said = "(?s)^block_mask: got .* it must be a BlockMask. Make one of a mask: build_block_mask"
    with pytest.raises(ValueError, match=said):
        ask(given)
