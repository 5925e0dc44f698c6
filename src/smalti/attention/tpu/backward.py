"""Backward kernel: recomputes the weights from the saved logsumexp (FlashAttention-2,
arXiv:2307.08691, algorithm 2). With ``P = exp(S − lse)`` and ``δ = rowsum(dO · O) − dlse``:

    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ − δ)    dQ = scale · dS K    dK = scale · dSᵀ Q

One launch makes all three where all keys of a head are in VMEM at once. Longer sequences take two,
one with the keys running fastest for dQ, one with the queries running fastest for dK and dV, so
that each sums in VMEM.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu import pipeline
from smalti.attention.tpu.grid import Block, Grid, Refs
from smalti.attention.tpu.layout import Heads, put, take
from smalti.attention.tpu.scores import (
    Rules,
    hide,
    keep_seen,
    place_of,
    zero_hidden,
)
from smalti.attention.tpu.tiles import Walk
from smalti.attention.tpu.vmem import MAKES, Launch


def kernel(refs: Refs, *, rules: Rules, grid: Grid):
    # Blocks of arrays are written here as [tokens, dims]; in the layout BHDS they are transposed.
    q_ref = refs.q  # [major_q, D]
    k_ref = refs.k  # [major_kv, D]
    v_ref = refs.v  # [major_kv, Dv]
    dout_ref = refs.dout  # [major_q, Dv]
    # lse, delta: [1, major_q] float32, lse in base 2.
    # dq, dk, dv: like q, k, v, or not made; their sums float32, [dims, tokens], with streamed tiles
    # transposed.
    # scores, dweights: [2, block_kv, block_q] float32
    heads, walk, blocks = grid.heads, grid.walk, grid.walk.blocks
    tokens = heads.token_axis
    assert q_ref.shape == heads.block(blocks.major_q, heads.D), q_ref.shape
    assert k_ref.shape == heads.block(blocks.major_kv, heads.D), k_ref.shape
    assert v_ref.shape == heads.block(blocks.major_kv, heads.Dv), v_ref.shape
    assert dout_ref.shape == heads.block(blocks.major_q, heads.Dv), dout_ref.shape
    assert refs.lse.shape == refs.delta.shape == (1, blocks.major_q), refs.lse.shape
    assert refs.scores.shape == refs.dweights.shape == (2, blocks.block_kv, blocks.block_q)
    makes_dq, makes_dkv = refs.dq is not None, refs.dk is not None
    at = grid.ids()

    if makes_dq:

        @pl.when(grid.is_first(at, "j"))
        def _():
            refs.dq_acc[...] = jnp.zeros(refs.dq_acc.shape, jnp.float32)

    if makes_dkv:

        @pl.when(grid.is_first(at, "g", "i"))
        def _():
            refs.dk_acc[...] = jnp.zeros(refs.dk_acc.shape, jnp.float32)
            refs.dv_acc[...] = jnp.zeros(refs.dv_acc.shape, jnp.float32)

    def use(t, slot, parts):
        place = place_of(t, refs.tiles, at, walk)
        for part in parts:
            queries, keys = place.queries(part), place.keys(part)
            q, dout = take(q_ref, queries, heads), take(dout_ref, queries, heads)
            weights, dscores, seen = weights_and_dscores(slot, part, place, rules, refs)
            weights, dscores = weights.astype(q.dtype), dscores.astype(q.dtype)
            if makes_dkv:
                _add(refs.dv_acc, keys, weights, 1, dout, rules, grid)  # dV += Pᵀ dO
                _add(refs.dk_acc, keys, dscores, 1, q, rules, grid)  # dK += dSᵀ Q
            if makes_dq:
                k = keep_seen(take(k_ref, keys, heads), seen, tokens)
                _add(refs.dq_acc, queries, dscores, 0, k, rules, grid)  # dQ += dS K

    fill = functools.partial(fill_products, at=at, rules=rules, refs=refs, grid=grid)
    pipeline.run(walk, refs.tiles, at, fill, use)

    if makes_dq:

        @pl.when(grid.is_last(at, "j"))
        def _():
            pipeline.in_chunks(
                blocks.major_q, lambda rows: _finish(refs.dq, refs.dq_acc, rows, rules.scale, grid)
            )

    if makes_dkv:

        @pl.when(grid.is_last(at, "g", "i"))
        def _():
            def finish(rows):
                _finish(refs.dk, refs.dk_acc, rows, rules.scale, grid)
                _finish(refs.dv, refs.dv_acc, rows, 1.0, grid)

            pipeline.in_chunks(blocks.major_kv, finish)


def _add(sum_ref, rows, tile, contracted: int, array, rules: Rules, grid: Grid) -> None:
    """Add the product of a score tile ``[keys, queries]`` with an array over one of its axes, to
    ``rows`` of a sum."""
    tokens = grid.heads.token_axis
    if grid.walk.blocks.streamed:
        sum_ref[rows, :] += rules.product(tile, array, contracted, tokens)
    else:
        sum_ref[:, rows] += rules.product(array, tile, tokens, contracted)


def _finish(ref, sum_ref, rows, factor: float, grid: Grid) -> None:
    streamed = grid.walk.blocks.streamed
    total = sum_ref[rows, :] if streamed else sum_ref[:, rows]
    put(ref, rows, total * factor, grid.heads, by_row=streamed)


def fill_products(t, slot: int, parts, *, at, rules: Rules, refs: Refs, grid: Grid) -> None:
    """K Qᵀ and V dOᵀ of a tile, into its slot."""
    heads, place = grid.heads, place_of(t, refs.tiles, at, grid.walk)
    dims = 1 - heads.token_axis
    for part in parts:
        q, dout = (take(x, place.queries(part), heads) for x in (refs.q, refs.dout))
        k, v = (take(x, place.keys(part), heads) for x in (refs.k, refs.v))
        products = rules.product(k, q, dims, dims)  # [keys, queries]
        refs.scores[slot, part.keys, part.queries] = rules.scaled(products)
        refs.dweights[slot, part.keys, part.queries] = rules.product(v, dout, dims, dims)


def weights_and_dscores(
    slot: int, part, place, rules: Rules, refs: Refs, *, before_cap: bool = True
):
    """The weights P and the gradient dS of scores, before the cap or after it, both
    ``[keys, queries]`` float32; and which keys are seen, see `hide`."""
    scores, slope = rules.capped(refs.scores[slot, part.keys, part.queries])
    scores, seen = hide(scores, part, place, rules, refs)
    queries = place.queries(part)
    weights = jnp.exp2(scores - refs.lse[:, queries])
    dscores = weights * (refs.dweights[slot, part.keys, part.queries] - refs.delta[:, queries])
    if before_cap and slope is not None:
        dscores = dscores * slope
    return weights, zero_hidden(dscores, scores, part), seen


def backward(
    q, k, v, dout, lse, delta, bias, mask_arrays, walk: Walk, rules: Rules, heads: Heads, *,
    vmem_limit, interpret,
):  # fmt: skip
    """Gradients of padded arrays.

    Args:
      q, k, v, bias, mask_arrays, walk, rules, heads: as for `forward`.
      dout: cotangent of out, like it.
      lse: float32 ``[B, Hq, 1, Sq]`` in base 2, +inf in rows that see no key or do not exist.
      delta: float32 ``[B, Hq, 1, Sq]``, 0 in those rows, as q and dout are.

    Returns:
      ``dq, dk, dv`` like q, k, v.
    """
    arrays = (q, k, v, dout, lse, delta, bias, mask_arrays, walk, rules, heads)
    options = {"vmem_limit": vmem_limit, "interpret": interpret}
    if walk.num_kv == 1:
        return _launch(*arrays, launch="backward", **options)
    (dq,) = _launch(*arrays, launch="backward_dq", **options)
    dk, dv = _launch(*arrays, launch="backward_dk_dv", **options)
    return dq, dk, dv


def _launch(
    q, k, v, dout, lse, delta, bias, mask_arrays, walk: Walk, rules: Rules, heads: Heads, *,
    launch: Launch, vmem_limit, interpret,
):  # fmt: skip
    blocks, makes = walk.blocks, MAKES[launch]
    if launch == "backward_dq":
        grid = Grid(heads, walk, order=("b", "hkv", "g", "i", "j"), sums=("j",))
    else:
        grid = Grid(heads, walk, order=("b", "hkv", "j", "g", "i"), sums=("g", "i"))
    inputs = inputs_of(grid, q, k, v, dout, lse, delta, bias, mask_arrays)
    tile = pltpu.VMEM((2, blocks.block_kv, blocks.block_q), jnp.float32)
    outputs, scratch = [], {"scores": tile, "dweights": tile}
    for name, like, block, length in (
        ("dq", q, grid.by_query, blocks.major_q),
        ("dk", k, grid.by_key, blocks.major_kv),
        ("dv", v, grid.by_key, blocks.major_kv),
    ):
        if name in makes:
            dim = heads.Dv if name == "dv" else heads.D
            outputs.append(block(name, jax.ShapeDtypeStruct(like.shape, like.dtype), dim))
            sums = (length, dim) if blocks.streamed else (dim, length)
            scratch[f"{name}_acc"] = pltpu.VMEM(sums, jnp.float32)
    return grid.call(
        kernel,
        inputs,
        outputs,
        scratch,
        rules=rules,
        products=2 + len(makes),
        name=f"smalti_attention_{launch}",
        vmem_limit_bytes=vmem_limit,
        interpret=interpret,
    )


def inputs_of(grid: Grid, q, k, v, dout, lse, delta, bias, mask_arrays) -> list[Block]:
    """What every kernel of the backward reads."""
    heads = grid.heads
    return [
        *grid.tiles(),
        grid.by_query("q", q, heads.D),
        grid.by_key("k", k, heads.D),
        grid.by_key("v", v, heads.Dv),
        grid.by_query("dout", dout, heads.Dv),
        grid.row("lse", lse),
        grid.row("delta", delta),
        *grid.mods(mask_arrays, bias),
    ]
