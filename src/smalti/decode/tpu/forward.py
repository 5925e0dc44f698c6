"""One kernel: new tokens over the cache, block by block, and over themselves.

The queries of a key head's group, for all new tokens, are the rows of one matrix. Their softmax
starts with the new keys, of which every query sees its own, so that its maximum is finite from the
start; then comes the cache as it was before them. How much of it was written is known before a step
starts: a block without a written slot is neither copied nor computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.backend import kernel_precision
from smalti.tpu.lanes import SUBLANES, round_up
from smalti.tpu.launch import launch
from smalti.varying import vary_over, varying_axes

from ..ring_buffer import RingBuffer, sees_new, sees_slot
from . import blocks
from .operands import block_of, in_hbm, new_tokens, padded, place_of, token_axis

# Rows of `scalars`, by sequence.
LENGTH, NEXT_SLOT, TOKENS, LIVE_BLOCKS = range(4)


def kernel(
    # prefetched
    scalars_ref,  # [4, B] int32
    # inputs
    q_ref,  # [heads, rows or 2·rows, D]: for the window, and where they differ for sink tokens
    new_k_ref,  # [heads, new, D], or [heads, D, new]: as the cache is kept
    new_v_ref,  # [heads, new, Dv], or [heads, Dv, new]
    k_ref,  # [heads, block, D], or [heads, D, block]
    v_ref,  # [heads, block, Dv], or [heads, Dv, block]
    # outputs
    out_ref,  # [heads, rows, Dv]
    # scratch
    m_ref,  # [heads, rows, 1] float32
    l_ref,  # [heads, rows, 1] float32
    acc_ref,  # [heads, rows, Dv] float32
    *,
    T: int,
    sinks: int,
    window: int,
    scale: float,
    softcap: float | None,
):
    heads, rows, Dv = out_ref.shape
    D = q_ref.shape[2]
    keys_axis, values_axis = token_axis(D), token_axis(Dv)
    new, block = new_k_ref.shape[1 + keys_axis], k_ref.shape[1 + keys_axis]
    assert q_ref.shape[1] in (rows, 2 * rows), (q_ref.shape, out_ref.shape)
    assert k_ref.shape[1:] == block_of(D, block), (k_ref.shape, q_ref.shape)
    assert v_ref.shape[1:] == block_of(Dv, block), (v_ref.shape, out_ref.shape)
    b, j = pl.program_id(0), pl.program_id(2)
    length, next_slot, tokens = (scalars_ref[i, b] for i in (LENGTH, NEXT_SLOT, TOKENS))
    # Which new token a row is of: the rows of a head stand together.
    t = lax.rem(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), np.int32(T))

    def product(x, y, axis: int):
        """Over lanes of x and an axis of y."""
        if y.shape[1 - axis] == 1:  # Mosaic multiplies no single row of bfloat16
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return lax.dot_general(
            x,
            y,
            (((1,), (axis,)), ((), ())),
            precision=kernel_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )

    def scores(head: int, keys, is_sink):
        """``[rows, keys]``"""
        s = product(q_ref[head], keys, 1 - keys_axis)
        if q_ref.shape[1] > rows:
            s = jnp.where(is_sink, s[rows:], s[:rows])
        s = s * scale
        return s if softcap is None else softcap * jnp.tanh(s / softcap)

    def weighed(weights, values):
        """``[rows, Dv]``"""
        return product(weights.astype(values.dtype), values, values_axis)

    @pl.when(j == 0)
    def _():
        u = lax.broadcasted_iota(jnp.int32, (rows, new), 1)
        seen = sees_new(u, t, length, sinks=sinks, window=window)
        # What is not real comes last, and none that is sees it; but 0 times NaN is NaN.
        real = lax.broadcasted_iota(jnp.int32, new_v_ref.shape[1:], values_axis) < tokens
        for head in range(heads):
            s = scores(head, new_k_ref[head], length + u < sinks)
            s = jnp.where(seen, s, -jnp.inf)
            m = jnp.max(s, axis=1, keepdims=True)
            weights = jnp.exp(s - m)
            m_ref[head] = m
            l_ref[head] = jnp.sum(weights, axis=1, keepdims=True)
            values = new_v_ref[head]
            acc_ref[head] = weighed(weights, jnp.where(real, values, jnp.zeros_like(values)))

    @pl.when(j < scalars_ref[LIVE_BLOCKS, b])
    def _():
        first = j * block
        slots = sinks + window
        slot = first + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        seen = sees_slot(slot, t, length, next_slot, sinks=sinks, window=window)
        # What no query sees: of a full cache the oldest of the window, else what was not written;
        # and what is behind the last slot.
        row = lax.broadcasted_iota(jnp.int32, v_ref.shape[1:], values_axis)
        dead_from = next_slot - first
        dead_until = jnp.where(length < slots, block, dead_from + 1)
        live = (row < dead_from) | (row >= dead_until)
        if slots % block:
            live &= row < slots - first
        for head in range(heads):
            s = scores(head, k_ref[head], slot < sinks)
            s = jnp.where(seen, s, -jnp.inf)
            m_before = m_ref[head]
            m = jnp.maximum(m_before, jnp.max(s, axis=1, keepdims=True))
            weights, decay = jnp.exp(s - m), jnp.exp(m_before - m)
            m_ref[head] = m
            l_ref[head] = l_ref[head] * decay + jnp.sum(weights, axis=1, keepdims=True)
            values = v_ref[head]
            values = jnp.where(live, values, jnp.zeros_like(values))
            acc_ref[head] = acc_ref[head] * decay + weighed(weights, values)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        for head in range(heads):
            out = jnp.where(t < tokens, acc_ref[head] / l_ref[head], 0.0)
            out_ref[head] = out.astype(out_ref.dtype)


def forward(q, q_sinks, cache: RingBuffer, k, v, lengths, *, scale, softcap, interpret):
    """As `reference`; ``q [B, Hq, T, D]``."""
    B, Hq, T, D = q.shape
    Hkv, Dv = v.shape[1], v.shape[3]
    group = Hq // Hkv
    rows = round_up(group * T, SUBLANES)
    chosen = blocks.choose(
        Hkv=Hkv, rows=cache.k.shape[2], query_rows=rows, D=D, Dv=Dv, itemsize=q.dtype.itemsize
    )
    heads, block = chosen.heads, chosen.rows

    def by_group(q):
        return padded(q.reshape(B, Hkv, group * T, D), rows)

    queries = by_group(q)
    if q_sinks is not None:
        queries = jnp.concatenate([queries, by_group(q_sinks)], axis=2)
    live = -(-jnp.minimum(cache.length, cache.slots) // block)
    live = jnp.where(lengths > 0, live, 0)
    scalars = jnp.stack([cache.length, cache.next_slot, lengths, live])
    arrays = scalars, queries, new_tokens(k), new_tokens(v), *in_hbm(cache, interpret)

    def by_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *shape), lambda b, h, j, scalars: (b, h, 0, 0))

    def of_cache(dim: int) -> pl.BlockSpec:
        def index(b, h, j, scalars):
            # Behind the last live block the same again, which is not copied again.
            return b, h, *place_of(dim, jnp.minimum(j, jnp.maximum(scalars[LIVE_BLOCKS, b] - 1, 0)))

        return pl.BlockSpec((None, heads, *block_of(dim, block)), index)

    (out,) = launch(
        functools.partial(
            kernel, T=T, sinks=cache.sinks, window=cache.window, scale=scale, softcap=softcap
        ),
        *vary_over(arrays, varying_axes(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, Hkv // heads, pl.cdiv(cache.k.shape[2], block)),
            in_specs=[
                by_head(queries.shape[2], D),
                *(by_head(*x.shape[2:]) for x in arrays[2:4]),
                of_cache(D),
                of_cache(Dv),
            ],
            out_specs=[by_head(rows, Dv)],
            scratch_shapes=[
                pltpu.VMEM((heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, Dv), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((B, Hkv, rows, Dv), q.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="smalti_decode",
    )
    return out[:, :, : group * T].reshape(B, Hq, T, Dv)
