"""The operands of both kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from smalti.tpu.lanes import SUBLANES, round_up

from ..ring_buffer import RingBuffer, rows_along_lanes


def token_axis(dim: int) -> int:
    """Of a block of ``[tokens, dim]``, or ``[dim, tokens]``, as the cache is kept."""
    return 1 if rows_along_lanes(dim) else 0


def as_kept(x: jax.Array) -> jax.Array:
    """``[B, H, tokens, dim]``, or its transpose, which of the cache is no copy."""
    return x.swapaxes(2, 3) if token_axis(x.shape[3]) else x


def new_tokens(x: jax.Array) -> jax.Array:
    """``[B, H, T, dim]`` with T rounded up, for Mosaic multiplies no single row of bfloat16, as the
    cache is kept. What is added comes last, where no query that is real sees it."""
    return as_kept(padded(x, round_up(x.shape[2], SUBLANES)))


def padded(x: jax.Array, rows: int) -> jax.Array:
    """``[B, H, rows, D]``"""
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)))


def block_of(dim: int, tokens: int) -> tuple[int, int]:
    return (dim, tokens) if token_axis(dim) else (tokens, dim)


def place_of(dim: int, block) -> tuple:
    """The index of a block of tokens."""
    return (0, block) if token_axis(dim) else (block, 0)


def in_hbm(cache: RingBuffer, interpret: Any) -> tuple[jax.Array, ...]:
    """The cache's keys and values, kept where they are. XLA takes it that a kernel reads all of an
    operand, and would first bring it into VMEM where that has room."""
    arrays = as_kept(cache.k), as_kept(cache.v)
    if interpret:  # one memory for all, without a name
        return arrays
    return tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays)
