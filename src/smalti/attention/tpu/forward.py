"""Forward kernel: tiled online softmax (FlashAttention-2, arXiv:2307.08691, algorithm 1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu import pipeline
from smalti.attention.tpu.grid import Grid, Refs
from smalti.attention.tpu.layout import Heads, put, take
from smalti.attention.tpu.operands import to_column
from smalti.attention.tpu.place import place_of
from smalti.attention.tpu.scores import (
    EMPTY_MAX,
    LOG2_E,
    Rules,
    hide,
    keep_seen,
    modified,
)
from smalti.attention.tpu.tiles import Walk, strips


def kernel(refs: Refs, *, rules: Rules, grid: Grid):
    # Blocks of arrays are written here as [tokens, dims]; in the layout BHDS they are transposed.
    q_ref = refs.q  # [major_q, D]
    k_ref = refs.k  # [major_kv, D]
    v_ref = refs.v  # [major_kv, Dv]
    out_ref = refs.out  # [major_q, Dv]
    lse_ref = refs.lse  # [1, major_q] float32, in base 2
    correction_ref = refs.correction  # like it, or not made
    m_ref, l_ref = refs.m, refs.l  # [1, major_q] float32, m in base 2
    acc_ref = refs.acc  # [Dv, major_q] float32, with streamed tiles [major_q, Dv]
    scores_ref = refs.scores  # [2, block_kv or more, block_q] float32
    # tiles: [1, counts + tiles] int32, pairs: [n] int32, sinks: [1, Hq] float32, all in SMEM.
    # bias: [major_q or 1, major_kv or 1]; mask, score_mod: lists, as `Grid.operands` has them.
    heads, walk, blocks = grid.heads, grid.walk, grid.walk.blocks
    tokens, dims = heads.token_axis, 1 - heads.token_axis
    assert q_ref.shape == heads.block(blocks.major_q, heads.D), q_ref.shape
    assert k_ref.shape == heads.block(blocks.major_kv, heads.D), k_ref.shape
    assert v_ref.shape == heads.block(blocks.major_kv, heads.Dv), v_ref.shape
    assert out_ref.shape == heads.block(blocks.major_q, heads.Dv), out_ref.shape
    assert lse_ref.shape == (1, blocks.major_q), lse_ref.shape
    assert scores_ref.shape == (2, *walk.tile_shape), scores_ref.shape
    at = grid.ids(refs)

    # What every query of the walk is met once with needs no sums over tiles.
    if not walk.one_tile_per_query:

        @pl.when(grid.is_first(at, "j"))
        def _():
            m_ref[...] = jnp.full(m_ref.shape, EMPTY_MAX, jnp.float32)
            l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
            acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def fill(t, slot, parts):
        place = place_of(t, refs.tiles, at, grid)
        for part in parts:
            q = take(q_ref, place.queries(part), heads)
            k = take(k_ref, place.keys(part), heads)
            products = rules.product(k, q, dims, dims)  # [keys, queries]; line 8, S
            scores_ref[slot, part.rows, part.queries] = rules.scaled(products)

    def use(t, slot, parts):
        place = place_of(t, refs.tiles, at, grid)
        for strip in strips(parts):
            queries = place.queries(strip[0])
            found = []
            for part in strip:
                scores = scores_ref[slot, part.rows, part.queries]
                scores, _ = rules.capped(modified(scores, part, place, rules, refs))
                found.append(hide(scores, part, place, rules, refs))
            # Lines 9 and 10: m, P, l and O, which the decay rescales to the new m.
            m_before = EMPTY_MAX if walk.one_tile_per_query else m_ref[:, queries]
            m = m_before
            for scores, _ in found:
                m = jnp.maximum(m, scores.max(0, keepdims=True))
            l, acc = 0.0, 0.0  # noqa: E741
            for part, (scores, seen) in zip(strip, found, strict=True):
                weights = jnp.exp2(scores - m)
                l += weights.sum(0, keepdims=True)  # noqa: E741
                v = keep_seen(take(v_ref, place.keys(part), heads), seen, tokens)
                weights = weights.astype(v.dtype)
                if blocks.streamed:
                    acc += rules.product(weights, v, 0, tokens)  # [queries, Dv]
                else:
                    acc += rules.product(v, weights, tokens, 0)  # [Dv, queries]
            if walk.one_tile_per_query:
                finish(queries, m, l, acc)
                continue
            decay = jnp.exp2(m_before - m)
            m_ref[:, queries] = m
            l_ref[:, queries] = decay * l_ref[:, queries] + l
            if blocks.streamed:
                acc_ref[queries, :] = acc_ref[queries, :] * to_column(decay) + acc
            else:
                acc_ref[:, queries] = acc_ref[:, queries] * decay + acc

    def finish(rows, m, l, acc):  # noqa: E741
        # Lines 12 and 13.
        empty = m == EMPTY_MAX
        l = jnp.where(empty, 1.0, l)  # noqa: E741
        decay = 1.0
        if refs.sinks is not None:  # a key with a score and no value
            sink = refs.sinks[0, grid.q_head(at)] * LOG2_E
            top = jnp.maximum(m, sink)
            decay = jnp.exp2(m - top)
            l, m = l * decay + jnp.exp2(sink - top), top  # noqa: E741
        lse = m + jnp.log2(l)
        lse_ref[:, rows] = jnp.where(empty, -jnp.inf, lse)
        if correction_ref is not None:
            correction_ref[:, rows] = jnp.where(empty, 1.0, jnp.exp2((lse - m) - jnp.log2(l)))
        factor = jnp.where(empty, 0.0, decay / l)
        out = acc * (to_column(factor) if blocks.streamed else factor)
        put(out_ref, rows, out, heads, by_row=blocks.streamed)

    pipeline.run(walk, refs.tiles, at, fill, use)

    if not walk.one_tile_per_query:

        @pl.when(grid.is_last(at, "j"))
        def _():
            def finish_rows(rows):
                acc = acc_ref[rows, :] if blocks.streamed else acc_ref[:, rows]
                finish(rows, m_ref[:, rows], l_ref[:, rows], acc)

            pipeline.in_chunks(blocks.major_q, finish_rows)


def forward(
    q,
    k,
    v,
    sinks,
    bias,
    mods,
    walk: Walk,
    rules: Rules,
    heads: Heads,
    vmem_limit,
    interpret,
):
    """Attention of padded arrays.

    Args:
      q, k, v: ``[B, H, S, D]`` or as ``heads`` says, of whole major blocks.
      sinks: float32 ``[Hq]`` or None. bias: ``[1 or B, 1 or Hq, 1 or Sq, 1 or Sk]``, padded as q
        and k are, or None.
      mods: operands of the mask and of ``score_mod`` (`operands.padded`). walk: `plan.plan`.

    Returns:
      ``out`` like q with Dv, ``lse [B, Hq, 1, Sq]`` float32 in base 2; −inf where no key is seen,
      also where there is a sink. And with a ``score_mod`` or bias, which may make all scores of a
      row hugely negative, ``correction`` like lse, else None: what ``exp(score − lse)`` is to be
      multiplied by, as lse was rounded.
    """
    blocks = walk.blocks
    grid = Grid.by_queries(heads, walk)
    inputs = [
        *grid.tiles(),
        grid.by_query("q", q, heads.D),
        grid.by_key("k", k, heads.D),
        grid.by_key("v", v, heads.Dv),
        *grid.mods(rules, mods, bias),
    ]
    if sinks is not None:
        inputs.append(grid.scalars("sinks", sinks[None]))
    out = jax.ShapeDtypeStruct(heads.shape(heads.Hq, walk.q_padded, heads.Dv), q.dtype)
    lse = jax.ShapeDtypeStruct((heads.B, heads.Hq, 1, walk.q_padded), jnp.float32)
    sums = {}
    if not walk.one_tile_per_query:
        acc = (blocks.major_q, heads.Dv) if blocks.streamed else (heads.Dv, blocks.major_q)
        shapes = {"m": (1, blocks.major_q), "l": (1, blocks.major_q), "acc": acc}
        sums = {name: pltpu.VMEM(shape, jnp.float32) for name, shape in shapes.items()}
    outputs = [grid.by_query("out", out, heads.Dv), grid.row("lse", lse)]
    if rules.score_mod.is_given or bias is not None:
        outputs.append(grid.row("correction", lse))
    out, lse, *correction = grid.call(
        kernel,
        inputs,
        outputs,
        {**sums, "scores": pltpu.VMEM((2, *walk.tile_shape), jnp.float32)},
        rules=rules,
        products=2,
        name="smalti_attention_forward",
        vmem_limit_bytes=vmem_limit,
        interpret=interpret,
    )
    return out, lse, correction[0] if correction else None
