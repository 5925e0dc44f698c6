"""The angles inside a kernel, computed from positions.

A table of cosines and sines has 8·D bytes a token, as many as two heads of bfloat16 read and
written; a position has 4.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from smalti.tpu.lanes import LANES

from ..rope import Rope, cosine, sine, turned


def steps_by_lane(rope: Rope, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """`Rope.steps` of the lanes of some heads, ``[1, heads·D]`` each; 0 in still lanes."""

    def by_lane(steps):
        row = np.zeros(rope.head_dim, steps.dtype)
        row[rope.pairs] = steps
        return np.tile(row, heads)[None]

    whole, rest = rope.steps
    return by_lane(whole), by_lane(rest)


def tiled_positions(positions: jax.Array, block_s: int) -> jax.Array:
    """``[S]`` or ``[B, S]`` → ``[B or 1, tiles, 1, n]``: along lanes, n a multiple of 128."""
    positions = jnp.atleast_2d(positions)
    B, S = positions.shape
    tiles = pl.cdiv(S, block_s)
    rows = jnp.pad(positions, ((0, 0), (0, tiles * block_s - S))).reshape(B, tiles, 1, block_s)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, -block_s % LANES)))


def cos_sin(positions_ref, whole_ref, rest_ref, block_s: int) -> tuple[jax.Array, jax.Array]:
    """Of a tile's rows, ``[block_s, width]`` float32 each; exactly 1 and 0 in still lanes."""
    shape = (block_s, whole_ref.shape[1])
    positions = jnp.broadcast_to(_column(positions_ref[...])[:block_s], shape)
    angle = turned(positions, whole_ref[...], rest_ref[...])
    return cosine(angle), sine(angle)


def _column(row) -> jax.Array:
    """``[1, n]`` int32, n a multiple of 128 → ``[n, 1]``, by transposing squares."""
    squares = (
        jnp.broadcast_to(row[:, i : i + LANES], (LANES, LANES)).T
        for i in range(0, row.shape[1], LANES)
    )
    return jnp.concatenate([square[:, :1] for square in squares], axis=0)
