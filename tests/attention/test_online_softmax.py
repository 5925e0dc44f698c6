"""Keys that arrive in pieces give what they give at once."""

import jax
import jax.numpy as jnp
import numpy as np

from smalti.attention.online_softmax import State, finish, merge, update


def whole(scores, values):
    lse = np.logaddexp.reduce(scores, -1)
    weights = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return weights @ values, lse


def pieces(scores, values, cuts):
    rows, dim = scores.shape[0], values.shape[1]
    state = State(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((rows, dim)))
    for a, b in zip([0, *cuts], [*cuts, scores.shape[1]], strict=True):
        state = update(state, scores[:, a:b], lambda w, a=a, b=b: w @ values[a:b])
    return finish(state)


def sample(seed=0, rows=6, keys=20, dim=3):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(rows, keys)).astype(np.float32) * 5
    scores[0] = -np.inf  # sees nobody
    scores[1, :10] = -np.inf  # nobody in the first piece
    scores[2] = np.arange(keys)  # the maximum moves with every piece
    return scores, rng.normal(size=(keys, dim)).astype(np.float32)


def test_pieces_are_the_whole():
    scores, values = sample()
    expected, expected_lse = whole(scores.astype(np.float64), values)
    for cuts in ([], [10], [1, 2, 3], [5, 10, 15]):
        out, lse, correction = pieces(jnp.asarray(scores), jnp.asarray(values), cuts)
        np.testing.assert_allclose(correction, 1, atol=1e-5)
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)
    assert (np.asarray(out[0]) == 0).all()
    assert np.isneginf(lse[0])


def test_the_correction_makes_weights_of_a_rounded_lse():
    for m in (0.0, 80.0, -1e4, -1e9, -1e30, float(np.finfo(np.float32).min)):
        scores = jnp.full((1, 20), m, jnp.float32)
        _, lse, correction = pieces(scores, jnp.zeros((20, 1)), [3])
        weights = jnp.exp(scores - lse[:, None]) * correction[:, None]
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)


def test_merge_of_two_halves():
    scores, values = sample(1)
    halves = [
        pieces(jnp.asarray(scores[:, s]), jnp.asarray(values[s]), [])[:2]
        for s in (slice(0, 10), slice(10, 20))
    ]
    out, lse = merge(*halves[0], *halves[1])
    expected, expected_lse = whole(scores.astype(np.float64), values)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)


def test_merge_has_finite_gradients_at_empty_sides():
    out, lse = jnp.ones((4, 2)), jnp.array([0.0, -jnp.inf, 1.0, -jnp.inf])
    other = jnp.array([0.5, 2.0, -jnp.inf, -jnp.inf])

    def loss(out, lse, other):
        merged, total = merge(out, lse, jnp.zeros_like(out), other)
        return merged.sum() + jnp.where(jnp.isfinite(total), total, 0).sum()

    for gradient in jax.grad(loss, (0, 1, 2))(out, lse, other):
        assert np.isfinite(gradient).all()
    d_lse = jax.grad(loss, 1)(out, lse, other)
    assert d_lse[1] == 0
    assert d_lse[3] == 0
