"""The forward kernel: tiles, padding, and what TPU interpret mode sees."""

import functools

import jax
import numpy as np
import pytest

from tests.support.interpreter import STRICT, no_races

from .. import calls, oracle
from . import interpreter


@functools.cache
def program(**options):
    return jax.jit(calls.kernels(**options))


def outputs(case, **options):
    return [np.array(x) for x in program(**options)(*calls.arrays(case), case.positions)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_the_tile_or_the_run(dtype):
    case = oracle.draw(S=21, dtype=dtype)
    whole, cut = outputs(case), outputs(case, block_s=8)
    interpreter.assert_same_but_for_rounding(cut, whole)
    assert max(oracle.excesses(case, cut).values()) <= 1
    for x, expected in zip(outputs(case), whole, strict=True):
        np.testing.assert_array_equal(x, expected)


def test_a_token_reaches_only_its_own_row():
    case = oracle.draw(S=21)
    clean = outputs(case, block_s=8)
    for x in (case.q, case.k, case.v):
        x[1, 20] = np.nan
    for x, expected in zip(outputs(case, block_s=8), clean, strict=True):
        assert np.isnan(x[1, :, 20]).all()
        x[1, :, 20] = expected[1, :, 20]
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("sizes", interpreter.SIZES)
def test_in_tpu_interpret_mode(sizes):
    case = oracle.draw(**sizes)
    with no_races(launches=1):
        found = outputs(case, block_s=8, interpret=STRICT, **interpreter.options(case))
    assert max(oracle.excesses(case, found).values()) <= 1
