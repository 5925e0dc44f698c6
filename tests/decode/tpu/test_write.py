"""The kernel that writes is the scatter, bit for bit, wherever tokens go."""

from unittest import mock

import jax
import numpy as np
import pytest

from smalti.decode import RingBuffer
from smalti.decode.tpu import write
from smalti.decode.tpu.write import written
from tests.decode.calls import compiled
from tests.support.inputs import normal
from tests.support.interpreter import STRICT, no_races


def caches(sinks, window, lengths, *, D, Dv, T, dtype):
    B, Hkv = len(lengths), 2
    cache = RingBuffer.empty(B, Hkv, D, Dv, sinks=sinks, window=window, dtype=dtype)
    k, v = (
        normal(*x.shape, seed=name, dtype=dtype) for name, x in (("k", cache.k), ("v", cache.v))
    )
    new = (normal(B, Hkv, T, dim, seed=f"new{dim}", dtype=dtype) for dim in (D, Dv))
    return RingBuffer(k, v, np.array(lengths, np.int32), sinks, window), *new


def assert_same(got: RingBuffer, expected: RingBuffer):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


# Within a tile, over the end of one, from the sink tokens on, around the end, more than stay, none.
LENGTHS = [5, 14, 1, 198, 200, 127, 126, 0]


@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        (8, "float32"),
        (128, "bfloat16"),
        pytest.param(8, "bfloat16", marks=pytest.mark.slow),
        pytest.param(128, "float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("sinks", "window"), [(3, 197), (0, 5), (6, 1)])
def test_it_is_the_scatter(sinks, window, D, dtype):
    cache, k, v = caches(sinks, window, LENGTHS, D=D, Dv=128, T=4, dtype=dtype)
    new = np.array([4, 4, 4, 4, 3, 1, 4, 0], np.int32)
    expected = cache.written(k, v, new)
    write = compiled(lambda *x: written(*x, interpret=True))
    assert_same(write(cache, k, v, new), expected)


def test_a_step_may_have_one_sequence_and_one_head():
    cache, k, v = caches(3, 197, [5, 198], D=8, Dv=128, T=2, dtype="float32")
    new = np.array([2, 1], np.int32)
    with mock.patch.object(write, "VMEM_BUDGET_BYTES", 0):
        got = compiled(lambda *x: written(*x, interpret=True))(cache, k, v, new)
    assert_same(got, cache.written(k, v, new))


@pytest.mark.slow
@pytest.mark.parametrize(("D", "sinks"), [(128, 10), (8, 122)])
def test_it_races_with_nothing(D, sinks):
    """Tokens that go to a tile, to the next, and around to the first again."""
    cache, k, v = caches(sinks, 8, [sinks + 4, 0], D=D, Dv=D, T=8, dtype="float32")
    new = np.array([8, 2], np.int32)
    with no_races(launches=1):
        got = compiled(lambda *x: written(*x, interpret=STRICT))(cache, k, v, new)
        jax.block_until_ready(got)
    assert_same(got, cache.written(k, v, new))
