"""The kernel that writes new tokens into the cache, in place.

XLA's scatter would bring the whole cache into another layout and back. Memory is read and written
by tiles of rows; the kernel visits those that new tokens go to, each with all heads.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.tpu.launch import launch
from smalti.varying import vary_over, varying_axes

from ..ring_buffer import RingBuffer, rows_per_tile
from .operands import block_of, in_hbm, new_tokens, place_of, token_axis


def kernel(
    # prefetched
    visited_ref,  # [T, B] int32, ascending: a slot in the tile of a step
    slots_ref,  # [T, B] int32: where a token goes; out of bounds if it does not stay
    # inputs, as the cache is kept
    new_k_ref,  # [Hkv, new, D], or [Hkv, D, new]
    new_v_ref,
    k_ref,  # [Hkv, tile, D], or [Hkv, D, tile]
    v_ref,
    # outputs
    k_out_ref,  # as k_ref
    v_out_ref,
    *,
    D: int,
    Dv: int,
):
    b, x = pl.program_id(0), pl.program_id(1)
    for dim, ref, new_ref, out_ref in (
        (D, k_ref, new_k_ref, k_out_ref),
        (Dv, v_ref, new_v_ref, v_out_ref),
    ):
        axis, tile = 1 + token_axis(dim), rows_per_tile(dim)
        rows, new = ref[...], new_ref[...]
        row = lax.div(visited_ref[x, b], tile) * tile
        row += lax.broadcasted_iota(jnp.int32, rows.shape, axis)
        # A tile of several tokens is visited by steps in a row, and gets all of them in each.
        for t in range(slots_ref.shape[0]):
            token = lax.slice_in_dim(new, t, t + 1, axis=axis)
            rows = jnp.where(row == slots_ref[t, b], token, rows)
        out_ref[...] = rows


def written(cache: RingBuffer, k, v, lengths, *, interpret) -> RingBuffer:
    """As `RingBuffer.written`, for few tokens."""
    B, Hkv, T, D = k.shape
    Dv = v.shape[3]
    slots = cache.new_slots(T, lengths).T  # [T, B]
    visited = jnp.sort(jnp.where(slots < cache.k.shape[2], slots, 0), axis=0)
    new = new_tokens(k), new_tokens(v)
    arrays = visited, slots, *new, *in_hbm(cache, interpret)

    def by_sequence(shape) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, x, visited, slots: (b, 0, 0, 0))

    def tile(dim: int) -> pl.BlockSpec:
        rows = rows_per_tile(dim)

        def index(b, x, visited, slots):
            return b, 0, *place_of(dim, lax.div(visited[x, b], rows))

        return pl.BlockSpec((None, Hkv, *block_of(dim, rows)), index)

    k, v = launch(
        functools.partial(kernel, D=D, Dv=Dv),
        *vary_over(arrays, varying_axes(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, T),
            in_specs=[*(by_sequence(x.shape[1:]) for x in new), tile(D), tile(Dv)],
            out_specs=[tile(D), tile(Dv)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[4:]],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="smalti_decode_write",
    )
    return dataclasses.replace(cache, k=_back(k, D), v=_back(v, Dv), length=cache.length + lengths)


def _back(x: jax.Array, dim: int) -> jax.Array:
    return x.swapaxes(2, 3) if token_axis(dim) else x
