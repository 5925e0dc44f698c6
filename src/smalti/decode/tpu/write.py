"""The kernel that writes new tokens into the cache, in place.

XLA's scatter would bring the whole cache into another layout and back. Memory is read and written
by tiles of rows; the kernel visits those that new tokens go to, each with all heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.tpu.lanes import round_up
from smalti.tpu.launch import launch
from smalti.varying import vary_over, varying_axes

from ..ring_buffer import TILE, RingBuffer
from .operands import SUBLANES, in_hbm, padded


def kernel(
    # prefetched
    tiles_ref,  # [T, B] int32, ascending: the tile of a step
    slots_ref,  # [T, B] int32: where a token goes; out of bounds if it does not stay
    # inputs
    new_k_ref,  # [Hkv, new, D]
    new_v_ref,  # [Hkv, new, Dv]
    k_ref,  # [Hkv, TILE, D]
    v_ref,  # [Hkv, TILE, Dv]
    # outputs
    k_out_ref,  # [Hkv, TILE, D]
    v_out_ref,  # [Hkv, TILE, Dv]
):
    b, x = pl.program_id(0), pl.program_id(1)
    first = tiles_ref[x, b] * TILE
    for ref, new_ref, out_ref in (
        (k_ref, new_k_ref, k_out_ref),
        (v_ref, new_v_ref, v_out_ref),
    ):
        # A tile of several tokens is visited by steps in a row, and gets all of them in each.
        rows = ref[...]
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
        for t in range(slots_ref.shape[0]):
            here = row == slots_ref[t, b] - first
            rows = jnp.where(here, new_ref[:, t : t + 1], rows)
        out_ref[...] = rows


def written(cache: RingBuffer, k, v, lengths, *, interpret) -> RingBuffer:
    """As `RingBuffer.written`, for few tokens."""
    B, Hkv, T, D = k.shape
    Dv = v.shape[3]
    slots = cache.new_slots(T, lengths).T  # [T, B]
    stays = slots < cache.k.shape[2]
    tiles = jnp.sort(jnp.where(stays, slots // TILE, 0), axis=0)
    new = round_up(T, SUBLANES)
    rows = in_hbm(cache, interpret)
    arrays = tiles, slots, padded(k, new), padded(v, new), *rows

    def by_sequence(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, Hkv, new, dim), lambda b, x, tiles, slots: (b, 0, 0, 0))

    def tile(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, Hkv, TILE, dim), lambda b, x, tiles, slots: (b, 0, tiles[x, b], 0)
        )

    k, v = launch(
        kernel,
        *vary_over(arrays, varying_axes(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, T),
            in_specs=[by_sequence(D), by_sequence(Dv), tile(D), tile(Dv)],
            out_specs=[tile(D), tile(Dv)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (cache.k, cache.v)],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="smalti_decode_write",
    )
    return dataclasses.replace(cache, k=k, v=v, length=cache.length + lengths)
