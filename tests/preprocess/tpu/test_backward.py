"""The backward kernel: tiles, padding, sums, and what TPU interpret mode sees."""

import numpy as np
import pytest

from tests.support.interpreter import STRICT, no_races

from .. import calls, oracle
from . import interpreter


def results(case, **options):
    return calls.with_gradients(calls.kernels(**options), case)


def test_rows_do_not_depend_on_the_tile_and_sums_stay_within_the_budget():
    case = oracle.draw(S=21)
    _, whole = results(case)
    outputs, cut = results(case, block_s=8)
    interpreter.assert_same_but_for_rounding(cut[:3], whole[:3])
    assert max(oracle.excesses(case, outputs, cut).values()) <= 1


def test_two_runs_are_bitwise_equal():
    case = oracle.draw(S=21)
    (_, first), (_, second) = results(case, block_s=8), results(case, block_s=8)
    for x, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, again)


def test_a_token_reaches_only_its_own_row_and_the_scales():
    case = oracle.draw(S=21)
    _, clean = results(case, block_s=8)
    for x in (case.q, case.k):
        x[1, 20] = np.nan
    _, (dq, dk, dv, dq_scale, dk_scale) = results(case, block_s=8)
    assert np.isnan(dq[1, 20]).all()
    assert np.isnan(dk[1, 20]).all()
    dq[1, 20], dk[1, 20] = clean[0][1, 20], clean[1][1, 20]
    for x, expected in zip((dq, dk, dv), clean[:3], strict=True):
        np.testing.assert_array_equal(x, expected)
    assert np.isnan(dq_scale).all()
    assert np.isnan(dk_scale).all()


@pytest.mark.parametrize("sizes", interpreter.SIZES)
def test_in_tpu_interpret_mode(sizes):
    """The last tile is cut: what it holds past S is NaN here, and must not reach the sums."""
    case = oracle.draw(**sizes)
    options = interpreter.options(case)
    with no_races(launches=2):
        outputs, grads = results(case, block_s=8, interpret=STRICT, **options)
    assert max(oracle.excesses(case, outputs, grads).values()) <= 1
