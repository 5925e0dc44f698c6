"""The angles."""

import jax
import jax.numpy as jnp
import numpy as np

from smalti.preprocess.rope import cos_sin


def test_angles_are_those_of_the_formula():
    positions = np.array([0, 1, 17, -4, 4095], np.int32)
    cos, sin = cos_sin(jnp.asarray(positions), 6, 100.0)
    assert cos.shape == sin.shape == (5, 3)
    assert cos.dtype == sin.dtype == jnp.float32
    angle = positions[:, None] * 100.0 ** (-np.array([0, 2, 4]) / 6)
    # A float32 angle is off by half a unit in its last place for each of two roundings.
    allowed = (1 + np.abs(angle)) * np.finfo(np.float32).eps
    assert (np.abs(np.asarray(cos, np.float64) - np.cos(angle)) <= allowed).all()
    assert (np.abs(np.asarray(sin, np.float64) - np.sin(angle)) <= allowed).all()


def test_positions_may_be_traced_and_differ_by_batch():
    positions = np.arange(6, dtype=np.int32).reshape(2, 3)
    cos, _ = jax.jit(lambda p: cos_sin(p, 4, 10_000.0))(positions)
    assert cos.shape == (2, 3, 2)
    np.testing.assert_allclose(cos[1, 2], np.cos([5.0, 0.05]), rtol=1e-6)
