"""The operands of both kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..ring_buffer import RingBuffer

SUBLANES = 8


def padded(x: jax.Array, rows: int) -> jax.Array:
    """``[B, H, rows, D]``"""
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)))


def in_hbm(cache: RingBuffer, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """The cache's keys and values, kept where they are. XLA takes it that a kernel reads all of an
    operand, and would first bring it into VMEM where that has room."""
    if interpret:  # one memory for all, without a name
        return cache.k, cache.v
    k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (cache.k, cache.v))
    return k, v
