"""What adapters do around a kernel: layout and padding; inside the program, so it counts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from smalti.estimate.peers.case import AttentionCase

LANES = 128


def to_bhsd(case: AttentionCase, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays in the case's layout as [B, H, S, D]; the same call takes a result back."""
    if case.layout == "BHSD":
        return arrays
    return tuple(jnp.swapaxes(array, 1, 2) for array in arrays)


def pad_length(array: jax.Array, length: int) -> jax.Array:
    """[B, H, S, D] with zeros behind, to S = length."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, length - array.shape[2]), (0, 0)))


def clip(block: int, length: int) -> int:
    """A block no longer than the sequence, in whole lanes."""
    return min(block, math.ceil(length / LANES) * LANES)


def padded_length(length: int, *blocks: int) -> int | None:
    """The least multiple of all blocks that holds `length`; None where one divides not the largest.

    Those would pad beyond what their largest block needs: no user would pick them.
    """
    largest = max(blocks)
    if any(largest % block for block in blocks):
        return None
    return math.ceil(length / largest) * largest
