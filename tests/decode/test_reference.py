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
