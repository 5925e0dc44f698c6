"""Rotary position embedding (RoPE, arXiv:2104.09864): which lanes turn together, and how far.

Angles are counted in turns, as 32-bit integers: position times step wraps around where a turn ends,
so nothing is lost however far the position is. A float32 angle is off by position · 6e-8 radians;
cosines from these are off by less than 3e-7 at any int32 position, and need no range reduction.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

QUARTER = np.int32(2**30)  # of a turn, which is 2^32
# sin(π/2 · f) / f as a polynomial in f², highest power first: the one of this degree whose largest
# relative error on |f| ≤ 1 is least, 5.3e-9, by iteratively reweighted least squares.
SINE = (0.000151485135, -0.00467376644, 0.0796896815, -0.645963728, 1.57079637)


@dataclasses.dataclass(frozen=True)
class Rope:
    """The first ``rotary_dim`` lanes of a head turn in pairs; the others stay as they are."""

    head_dim: int
    rotary_dim: int
    theta: float
    interleaved: bool

    @property
    def pairs(self) -> np.ndarray:
        """``[2, rotary_dim/2]``: the first and the second lane of each pair."""
        lanes = np.arange(self.rotary_dim)
        return lanes.reshape(-1, 2).T if self.interleaved else lanes.reshape(2, -1)

    @property
    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """A pair's turn from one position to the next, in units of 2^-32 turns, ``[rotary_dim/2]``.

        int32, modulo a turn, and float32, what rounding left of it.
        """
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        step = self.theta**-exponent / (2 * np.pi) * 2.0**32
        whole = np.round(step)
        wrapped = np.remainder(whole, 2.0**32).astype(np.uint32).view(np.int32)
        return wrapped, (step - whole).astype(np.float32)


def turned(positions: jax.Array, whole, rest) -> jax.Array:
    """How far ``positions`` steps turn: int32 units of 2^-32 turns. All broadcast."""
    return positions * whole + (positions.astype(jnp.float32) * rest).astype(jnp.int32)


def cosine(angle: jax.Array) -> jax.Array:
    """The float32 cosine of int32 units of 2^-32 turns."""
    # cos(a) = sin(quarter − |a|), which is at most a quarter to either side.
    f = (QUARTER - jnp.abs(angle)).astype(jnp.float32) * np.float32(2.0**-30)
    square = f * f
    value = jnp.float32(SINE[0])
    for coefficient in SINE[1:]:
        value = value * square + np.float32(coefficient)
    return value * f


def sine(angle: jax.Array) -> jax.Array:
    return cosine(angle - QUARTER)
