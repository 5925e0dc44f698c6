"""Which lanes turn together, and how far."""

from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.preprocess.rope import Rope, cosine, sine, turned

# What a cosine may be off, its own rounding included.
WRONG_BY = 3e-7


def test_pairs_of_lanes():
    rope = Rope(head_dim=8, rotary_dim=6, theta=100.0, interleaved=False)
    np.testing.assert_array_equal(rope.pairs, [[0, 1, 2], [3, 4, 5]])
    rope = Rope(head_dim=8, rotary_dim=6, theta=100.0, interleaved=True)
    np.testing.assert_array_equal(rope.pairs, [[0, 2, 4], [1, 3, 5]])


@pytest.mark.parametrize("theta", [1.5, 100.0, 10_000.0, 1e7])
def test_angles_are_those_of_the_formula_at_any_position(theta):
    rng = np.random.default_rng(0)
    far = rng.integers(-(2**31), 2**31, 500)
    positions = np.concatenate([np.arange(-10, 1000), far, [2**31 - 1, -(2**31)]])
    rope = Rope(head_dim=12, rotary_dim=10, theta=theta, interleaved=False)

    @jax.jit
    def cos_sin(positions):
        angle = turned(positions[:, None], *rope.steps)
        return cosine(angle), sine(angle)

    cos, sin = cos_sin(jnp.asarray(positions, jnp.int32))
    assert cos.shape == sin.shape == (len(positions), 5)
    assert cos.dtype == sin.dtype == jnp.float32
    # 28 digits, of which a far position takes 10: float64 would be off by 4e-7.
    pi = Decimal("3.141592653589793238462643383")
    steps = [Decimal(theta) ** (Decimal(-i) / 10) / (2 * pi) for i in range(0, 10, 2)]
    turns = [[Decimal(int(p)) * step % 1 for step in steps] for p in positions]
    angle = 2 * np.pi * np.array(turns, np.float64)
    np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=WRONG_BY)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=WRONG_BY)


def test_whole_quarters_are_exact():
    quarters = jnp.array([0, 2**30, -(2**31), -(2**30)], jnp.int32)
    np.testing.assert_array_equal(cosine(quarters), [1, 0, -1, 0])
    np.testing.assert_array_equal(sine(quarters), [0, 1, 0, -1])
