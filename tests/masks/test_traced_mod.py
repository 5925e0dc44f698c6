"""User functions as programs: what they capture, what they read, and their values over a tile."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.masks.traced_mod import trace_mod

INDEX = jax.ShapeDtypeStruct((), jnp.int32)
SCORE = jax.ShapeDtypeStruct((), jnp.float32)
B, H, Q, K = np.arange(2), np.arange(3), np.arange(4), np.arange(5)
TABLE = jnp.arange(5, dtype=jnp.float32)


def trace_mask(function):
    return trace_mod(function, (INDEX,) * 4, name="mask_mod", result=bool)


def trace_score(function):
    return trace_mod(function, (SCORE, *(INDEX,) * 4), name="score_mod", result=float)


@pytest.mark.parametrize(
    ("function", "depends"),
    [
        (lambda b, h, q, k: q >= k, (False, False, True, True)),
        (lambda b, h, q, k: TABLE[k] > 2, (False, False, False, True)),
        (lambda b, h, q, k: (b == 0) & (h == 1), (True, True, False, False)),
        (lambda b, h, q, k: jnp.where(b == 0, q, k) > 1, (True, False, True, True)),
        (lambda b, h, q, k: jnp.array(True), (False, False, False, False)),
        (lambda b, h, q, k: b == b, (True, False, False, False)),  # may read, not does
        (lambda b, h, q, k: (jnp.sin(1.0 * h), q > 0)[1], (False, False, True, False)),
        (lambda b, h, q, k: jax.jit(lambda x, y: x > 0)(q, h), (False, True, True, False)),
    ],
)
def test_depends_says_which_arguments_are_read(function, depends):
    assert trace_mask(function).depends == depends


def test_depends_is_never_false_for_what_changes_the_result():
    table = jnp.arange(6).reshape(2, 3)

    def function(b, h, q, k):
        loop = jax.lax.fori_loop(0, 3, lambda i, x: x + table[b, h], q)
        return jax.lax.cond(loop > 4, lambda: k > 1, lambda: k <= 1)

    mod = trace_mask(function)
    values = np.asarray(mod.over_tile(*map(jnp.asarray, (B, H, Q, K))))
    for axis, reads in enumerate(mod.depends):
        assert reads or (values == values.take([0], axis)).all()
    assert mod.depends == (True, True, True, True)


def test_over_a_tile_it_is_the_function_at_every_element():
    function = lambda b, h, q, k: (q * (b + 1) + h) % 3 >= TABLE[k] - 1  # noqa: E731
    found = trace_mask(function).over_tile(*map(jnp.asarray, (B, H, Q, K)))
    b, h, q, k = np.ix_(B, H, Q, K)
    np.testing.assert_array_equal(found, (q * (b + 1) + h) % 3 >= np.arange(5.0)[k] - 1)


def test_over_scores_it_is_the_function_at_every_element():
    scores = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    function = lambda s, b, h, q, k: s * (1 + b) + TABLE[k] - q * h  # noqa: E731
    found = trace_score(function).over_scores(scores, *map(jnp.asarray, (B, H, Q, K)))
    b, h, q, k = np.ix_(B, H, Q, K)
    np.testing.assert_allclose(
        found, scores.astype(np.float64) * (1 + b) + k - q * h, rtol=0, atol=16 * 2**-24
    )


def test_captured_arrays_come_out_and_known_ones_are_known():
    ids = jnp.arange(5)
    mod = trace_score(lambda s, b, h, q, k: s + TABLE[k] * ids[k])
    assert mod.is_known
    assert sorted(str(x.dtype) for x in mod.captured) == ["float32", "int32"]
    (floating,) = mod.floating
    np.testing.assert_array_equal(floating, TABLE)

    @jax.jit
    def call(table):
        mod = trace_score(lambda s, b, h, q, k: s + table[k])
        assert not mod.is_known
        return mod.call(jnp.float32(1), *map(jnp.int32, (0, 0, 0, 3)))

    assert call(TABLE) == 4


def test_floating_captured_arrays_can_be_taken_out_and_put_back():
    ids = jnp.arange(5)
    mod = trace_score(lambda s, b, h, q, k: s + TABLE[k] * ids[k])
    without = mod.without_floating()
    assert sum(x is None for x in without.captured) == 1
    assert any(x is not None for x in without.captured)
    other = without.with_floating([10 * TABLE])
    at = (jnp.float32(1), *map(jnp.int32, (0, 0, 0, 3)))
    assert mod.call(*at) == 1 + 3 * 3
    assert other.call(*at) == 1 + 30 * 3


def test_a_captured_array_has_a_gradient():
    def total(table):
        mod = trace_score(lambda s, b, h, q, k: s * table[k])
        scores = jnp.ones((2, 3, 4, 5))
        return mod.over_scores(scores, *map(jnp.asarray, (B, H, Q, K))).sum()

    np.testing.assert_array_equal(jax.grad(total)(TABLE), np.full(5, 2 * 3 * 4.0))


@pytest.mark.parametrize(
    ("trace", "function", "text"),
    [
        (
            trace_score,
            lambda s, b, h, q, k: s if q > k else -s,
            "score_mod: it branches on the value of an index or score. It is traced elementwise, "
            "so use `&`, `|`, `~` and jnp.where instead of `and`, `or`, `not` and `if`.",
        ),
        (
            trace_score,
            lambda s, b, h, q: s,
            "score_mod: it must take (score, b, h, q_idx, kv_idx); calling it gave:",
        ),
        (
            trace_score,
            lambda s, b, h, q, k: q,
            "score_mod: for scalar arguments it must return one scalar, floating-point; it "
            "returned (int32",
        ),
        (trace_score, lambda s, b, h, q, k: (s, s), "it returned (float32[], float32[])."),
        (trace_mask, lambda b, h, q, k: TABLE[k], "one scalar, boolean; it returned (float32"),
        (trace_mask, lambda q, k: q >= k, "mask_mod: it must take (b, h, q_idx, kv_idx);"),
    ],
)
def test_a_function_that_is_not_elementwise_gets_advice(trace, function, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        trace(function)


def test_an_error_inside_the_function_is_its_own():
    with pytest.raises(TypeError, match="mine"):
        trace_mask(lambda b, h, q, k: (_ for _ in ()).throw(TypeError("mine")))


def test_an_error_inside_the_function_about_arguments_is_its_own():
    with pytest.raises(TypeError, match="positional argument") as raised:
        trace_score(lambda s, b, h, q, k: jnp.sin(s, 1, 2, 3))
    assert "score_mod" not in str(raised.value)


class OfFour:
    def __call__(self, s, b, h, q):
        return s


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k, x: s,
        lambda s, b, h, q, k, *, x: s,
        jax.jit(lambda s, b, h: s),
        functools.partial(lambda s, b, h, q, k: s, 1),
        OfFour(),
    ],
)
def test_a_function_of_other_arguments_is_told_which(function):
    with pytest.raises(ValueError, match=r"score_mod: it must take \(score, b, h, q_idx, kv_idx\)"):
        trace_score(function)


def test_a_function_without_a_signature():
    said = r"mask_mod: it does not say what it takes; it is given \(b, h, q_idx, kv_idx\);"
    with pytest.raises(ValueError, match=said):
        trace_mask(iter)
