"""Which token is where, and who sees it, against a list that is written to slot by slot."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.decode import RingBuffer, append
from smalti.decode.ring_buffer import sees_new, sees_slot

SMALL = st.tuples(st.integers(0, 5), st.integers(1, 9))  # sinks, window
quick = hypothesis.settings(max_examples=50, deadline=None, derandomize=True, database=None)


def positions_in_slots(length: int, sinks: int, window: int) -> np.ndarray:
    """After so many tokens; −1 where none was written."""
    slots = np.full(sinks + window, -1)
    for p in range(length):
        slots[p if p < sinks else sinks + (p - sinks) % window] = p
    return slots


@quick
@hypothesis.given(SMALL, st.integers(0, 40), st.integers(1, 12))
def test_visibility_is_the_streaming_mask(sizes, length, T):
    sinks, window = sizes
    t = np.arange(T)[:, None]
    mask = masks.streaming(sinks=sinks, window=window, offset=0)
    position = positions_in_slots(length, sinks, window)
    cache = RingBuffer.empty(1, 1, 1, sinks=sinks, window=window, dtype="float32")
    rows = cache.k.shape[2]
    next_slot = sinks + (length - sinks) % window if length >= sinks else length
    rules = {"sinks": sinks, "window": window}
    seen = np.asarray(sees_slot(np.arange(rows)[None], t, length, next_slot, **rules))
    assert not seen[:, sinks + window :].any()
    expected = np.asarray(mask(0, 0, length + t, position[None])) & (position >= 0)
    np.testing.assert_array_equal(seen[:, : sinks + window], expected)
    u = np.arange(T)[None]
    np.testing.assert_array_equal(
        sees_new(u, t, length, **rules), mask(0, 0, length + t, length + u)
    )


@quick
@hypothesis.given(SMALL, st.integers(0, 40), st.integers(1, 25), st.data())
def test_new_tokens_go_where_one_after_the_other_would(sizes, length, T, data):
    sinks, window = sizes
    new = data.draw(st.integers(0, T))
    cache = RingBuffer.empty(1, 1, 1, sinks=sinks, window=window, dtype="float32")
    rows = cache.k.shape[2]
    length = np.array([length], np.int32)
    cache = RingBuffer(cache.k, cache.v, length, sinks, window)
    slots = np.asarray(cache.new_slots(T, np.array([new], np.int32)))[0]
    assert len(set(slots)) == T  # no two are written to one slot
    got = positions_in_slots(length[0], sinks, window)
    for t, slot in enumerate(slots):
        if slot < rows:
            got[slot] = length[0] + t
    np.testing.assert_array_equal(got, positions_in_slots(length[0] + new, sinks, window))


def test_append_writes_what_is_real_and_nothing_else():
    cache = RingBuffer.empty(2, 1, 3, 2, sinks=2, window=4, dtype="float32")
    marked = RingBuffer(cache.k - 1, cache.v - 1, cache.length, 2, 4)
    token = jnp.arange(9.0)[None, :, None, None]
    k, v = jnp.tile(token, (2, 1, 1, 3)), jnp.tile(10 * token, (2, 1, 1, 2))
    cache = jax.jit(append)(marked, k, v, lengths=jnp.array([9, 3]))
    rows = [0, 1, 6, 7, 8, 5], [0, 1, 2, -1, -1, -1]
    for b, expected in enumerate(rows):
        np.testing.assert_array_equal(cache.k[b, 0, :6], np.tile(np.array(expected), (3, 1)).T)
        ten = np.where(np.array(expected) < 0, -1, 10 * np.array(expected))
        np.testing.assert_array_equal(cache.v[b, 0, :6], np.tile(ten, (2, 1)).T)
    assert (cache.k[:, :, 6:] == -1).all()
    assert (cache.length == jnp.array([9, 3])).all()


def test_memory_does_not_depend_on_what_was_generated_and_hardly_exceeds_the_slots():
    cache = RingBuffer.empty(2, 3, 128, sinks=4, window=1020, dtype="bfloat16")
    assert cache.k.shape == cache.v.shape == (2, 3, 1024, 128)
    assert cache.k.dtype == jnp.bfloat16
    narrow = RingBuffer.empty(2, 3, 64, 128, sinks=4, window=1000, dtype="float32")
    assert (narrow.k.shape, narrow.v.shape) == ((2, 3, 1024, 64), (2, 3, 1024, 128))
    k = jnp.ones((2, 5, 3, 128), jnp.bfloat16)
    appended = jax.eval_shape(append, cache, k, k)
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (appended, cache)]
    assert shapes[0] == shapes[1]


SIZES = {"batch": 1, "kv_heads": 1, "head_dim": 4, "window": 3, "dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window: got 0; it must be a Python int of at least 1, for shapes"),
        ({"sinks": -1}, "sinks: got -1; it must be a Python int of at least 0, for shapes are"),
        ({"batch": True}, "batch: got True; it must be a Python int of at least 1"),
        ({"head_dim": 4.0}, "head_dim: got 4.0; it must be a Python int of at least 1"),
        ({"value_dim": 0}, "value_dim: got 0; it must be a Python int of at least 1"),
        ({"window": 2**40}, f"window: got {2**40}, the largest of batch=1, kv_heads=1, head_dim=4"),
        (
            {"window": 2**40},
            "would take 35,184,372,088,832 bytes (32,768.0 GiB); each size, and sinks + window, "
            "must be at most 1073741824, for indices are int32. Make it smaller",
        ),
        (
            {"batch": 2**31},
            f"batch: got {2**31}, the largest of batch={2**31}, kv_heads=1, head_di",
        ),
        ({"window": 2**30, "sinks": 9}, f"window: got {2**30}, the largest of batch=1, kv_heads=1"),
        (
            {"window": 2**29, "kv_heads": 2**30, "batch": 2},
            f"kv_heads: got {2**30}, the largest of batch=2, kv_heads={2**30}, head_dim=4, value_",
        ),
        (
            {"window": 2**29, "kv_heads": 2**30},
            "of float32 would take 18,446,744,073,709,551,616 bytes (17,179,869,184.0 GiB); no mac",
        ),
        (
            {"window": 2**29, "kv_heads": 2**14},
            f"window: got {2**29}, the largest of batch=1, kv_heads={2**14}, head_dim=4, value_d",
        ),
        (
            {"dtype": "flaot32"},
            "dtype: got 'flaot32'; allowed are 'float32', 'bfloat16', 'float16'",
        ),
        ({"dtype": "flaot32"}, "'float16'. Did you mean 'float32'?"),
        ({"dtype": "bf16"}, "dtype: got 'bf16'; allowed are 'float32', 'bfloat16', 'float16'."),
        ({"dtype": None}, "dtype: got None; allowed are 'float32', 'bfloat16', 'float16'."),
        ({"dtype": 3}, "dtype: got 3; allowed are 'float32', 'bfloat16', 'float16'."),
        ({"dtype": "int32"}, "dtype: got int32; it must be that of the keys and values to come, o"),
        ({"dtype": "float64"}, "dtype: got float64; it must be that of the keys and values to co"),
        ({"dtype": float}, "dtype: got float64; it must be that of the keys and values to come"),
        ({"dtype": jnp.float8_e4m3fn}, "dtype: got float8_e4m3fn; it must be that of the keys"),
        ({"dtype": ">f4"}, "dtype: got >f4; it must be that of the keys and values to come, one"),
    ],
)
def test_wrong_sizes_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RingBuffer.empty(**(SIZES | changes))


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16, np.dtype("f4")])
def test_dtypes_are_named_in_any_way(dtype):
    cache = RingBuffer.empty(**(SIZES | {"dtype": dtype}))
    assert cache.k.dtype == cache.v.dtype == jnp.dtype(dtype)


def test_what_a_device_has_no_memory_for_is_said_in_bytes(monkeypatch):
    def zeros(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(jnp, "zeros", zeros)
    with pytest.raises(ValueError, match=r"^head_dim: got 4, the largest of .* take 4,096 bytes"):
        RingBuffer.empty(**SIZES)
