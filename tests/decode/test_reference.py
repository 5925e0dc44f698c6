"""The XLA path: its derivatives; its values are in `test_api`."""

import jax
import jax.numpy as jnp
import numpy as np

import smalti
from smalti.decode import attend

from .calls import Case
from .oracle import Rules


def test_it_has_derivatives():
    """Of a chunk over an empty cache: those of attention under the mask. NaN in slots and padding
    reaches none."""
    case = Case(Rules(2, 4), 9, np.array([[9, 5]]))
    clean = [np.nan_to_num(x[0]) for x in case.chunks]
    dirty = [x[0] for x in case.chunks]

    def decoding(q, k, v):
        out, cache = attend(q, case.empty(), k, v, lengths=case.lengths[0])
        return jnp.sum(jnp.sin(out)), cache

    def full(q, k, v):
        mask = smalti.masks.streaming(sinks=2, window=4) & smalti.masks.lengths(
            q=case.lengths[0], kv=case.lengths[0]
        )
        return jnp.sum(jnp.sin(smalti.attention(q, k, v, mask=mask, implementation="reference")))

    expected = jax.jit(jax.grad(full, (0, 1, 2)))(*clean)
    got, _ = jax.jit(jax.grad(decoding, (0, 1, 2), has_aux=True))(*dirty)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_single_tokens_have_the_derivatives_of_their_chunk():
    """A single token is written before it is read, over another one past the window."""
    case = Case(Rules(2, 4), 9, np.array([[9, 5]]))
    arrays = [x[0] for x in case.chunks]

    def loss(cut, *arrays):
        cache, total = case.empty(), 0.0
        for start in range(0, 9, cut):
            q, k, v = (x[:, start : start + cut] for x in arrays)
            lengths = jnp.clip(case.lengths[0] - start, 0, cut)
            out, cache = attend(q, cache, k, v, lengths=lengths)
            total += jnp.sum(jnp.sin(out))
        return total, cache.length

    gradient = jax.jit(jax.grad(loss, (1, 2, 3), has_aux=True), static_argnums=0)
    (expected, _), (got, length) = gradient(9, *arrays), gradient(1, *arrays)
    assert length.tolist() == [9, 5]
    for x, y in zip(got, expected, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
