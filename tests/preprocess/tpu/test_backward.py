"""The backward kernel: tiles, padding, sums, and what TPU interpret mode sees."""

import numpy as np
import pytest

from .. import calls, oracle
from . import interpreter


def gradients(case, **options):
    _, grads = calls.with_gradients(calls.kernels(case, **options), case)
    return [np.array(x) for x in grads]


@pytest.mark.parametrize("block_s", [8, None])
def test_two_runs_are_bitwise_equal(block_s):
    case = oracle.draw(S=37, D=16)
    for x, again in zip(
        gradients(case, block_s=block_s), gradients(case, block_s=block_s), strict=True
    ):
        np.testing.assert_array_equal(x, again)


def test_rows_do_not_depend_on_the_tile_and_sums_stay_within_the_budget():
    case = oracle.draw(S=37, D=16)
    whole, cut = gradients(case), gradients(case, block_s=8)
    for x, expected in zip(cut[:3], whole[:3], strict=True):
        np.testing.assert_array_equal(x, expected)
    outputs = oracle.exact(case)
    outputs = [x.astype(np.float32) for x in outputs]
    assert max(oracle.excesses(case, outputs, cut).values()) <= 1


def test_a_token_reaches_only_its_own_row_and_the_scales():
    case = oracle.draw(S=21, D=8)
    clean = gradients(case, block_s=8)
    for x in (case.q, case.k):
        x[1, 20] = np.nan
    dq, dk, dv, dq_scale, dk_scale = gradients(case, block_s=8)
    assert np.isnan(dq[1, 20]).all()
    dq[1, 20], dk[1, 20] = clean[0][1, 20], clean[1][1, 20]
    for x, expected in zip((dq, dk, dv), clean[:3], strict=True):
        np.testing.assert_array_equal(x, expected)
    assert np.isnan(dq_scale).all()
    assert np.isnan(dk_scale).all()


@pytest.mark.parametrize(
    "sizes",
    [
        {"S": 21, "Hq": 2, "Hkv": 1},
        {"S": 9, "D": 10, "dtype": "bfloat16", "positions": np.arange(18).reshape(2, 9)},
    ],
)
def test_in_tpu_interpret_mode(sizes):
    """The last tile is cut: what it holds past S is NaN here, and must not reach the sums."""
    case = oracle.draw(**sizes)
    call = calls.kernels(case, block_s=8, interpret=interpreter.STRICT)
    outputs, grads = calls.with_gradients(call, case)
    assert not interpreter.races_found()
    assert max(oracle.excesses(case, outputs, grads).values()) <= 1
