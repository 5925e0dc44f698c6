"""Backward kernel: recomputes the weights from the saved logsumexp (FlashAttention-2,
arXiv:2307.08691, algorithm 2). With ``P = exp(S − lse)`` and ``δ = rowsum(dO · O) − dlse``:

    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ − δ)    dQ = scale · dS K    dK = scale · dSᵀ Q

One launch makes all three where all keys of a head are in VMEM at once. Longer sequences take two,
one with the keys running fastest for dQ, one with the queries running fastest for dK and dV, so
that each sums in VMEM.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu import pipeline
from smalti.attention.tpu.grid import Block, Grid, Refs
from smalti.attention.tpu.launches import MAKES, MAKES_OF_MOD, SUMMED_OVER, Launch
from smalti.attention.tpu.layout import Heads, put, take
from smalti.attention.tpu.operands import add_gradient
from smalti.attention.tpu.place import Place, place_of
from smalti.attention.tpu.scores import (
    Rules,
    hide,
    keep_seen,
    modified_with_gradient,
    zero_hidden,
)
from smalti.attention.tpu.tiles import Part, Walk, strips
from smalti.tpu.lanes import LANES


def kernel(refs: Refs, *, rules: Rules, grid: Grid, launch: Launch):
    # Blocks of arrays are written here as [tokens, dims]; in the layout BHDS they are transposed.
    q_ref = refs.q  # [major_q, D]
    k_ref = refs.k  # [major_kv, D]
    v_ref = refs.v  # [major_kv, Dv]
    dout_ref = refs.dout  # [major_q, Dv]
    # lse, delta: [1, major_q] float32, lse in base 2.
    # dq, dk, dv: like q, k, v, or not made; their sums float32, [dims, tokens], with streamed tiles
    # transposed.
    # scores, dweights: [2, block_kv or more, block_q] float32
    # tiles, pairs, bias, mask, score_mod: as in `forward.kernel`; dscore_mod: list, float32, like
    # those operands of score_mod whose gradients are made here.
    heads, walk, blocks = grid.heads, grid.walk, grid.walk.blocks
    tokens = heads.token_axis
    assert q_ref.shape == heads.block(blocks.major_q, heads.D), q_ref.shape
    assert k_ref.shape == heads.block(blocks.major_kv, heads.D), k_ref.shape
    assert v_ref.shape == heads.block(blocks.major_kv, heads.Dv), v_ref.shape
    assert dout_ref.shape == heads.block(blocks.major_q, heads.Dv), dout_ref.shape
    assert refs.lse.shape == refs.delta.shape == (1, blocks.major_q), refs.lse.shape
    assert refs.scores.shape == refs.dweights.shape == (2, *walk.tile_shape)
    makes_dq, makes_dkv = refs.dq is not None, refs.dk is not None
    at = grid.ids(refs)

    if makes_dq and not walk.one_tile_per_query:

        @pl.when(grid.is_first(at, "j"))
        def _():
            refs.dq_acc[...] = jnp.zeros(refs.dq_acc.shape, jnp.float32)

    if makes_dkv:

        @pl.when(grid.is_first(at, "g", "i"))
        def _():
            refs.dk_acc[...] = jnp.zeros(refs.dk_acc.shape, jnp.float32)
            refs.dv_acc[...] = jnp.zeros(refs.dv_acc.shape, jnp.float32)

    dmod = dict(zip(made_of_mod(rules, launch), refs.dscore_mod, strict=True))
    for n, ref in dmod.items():
        kind = rules.score_mod.operands[n].kind

        @pl.when(grid.is_first(at, *SUMMED_OVER[kind]))
        def _(ref=ref):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    def use(t, slot, parts):
        place = place_of(t, refs.tiles, at, grid)
        for strip in strips(parts):
            queries = place.queries(strip[0])
            q, dout = take(q_ref, queries, heads), take(dout_ref, queries, heads)
            if any(map(may_be_empty, strip)):  # a query that sees nothing may hold NaN
                some = refs.lse[:, queries] < jnp.inf
                q, dout = (keep_seen(x, some, tokens) for x in (q, dout))
            dq = []
            for part in strip:
                keys = place.keys(part)
                found = score_gradients(slot, part, place, rules, refs)
                weights, dproducts = (x.astype(q.dtype) for x in (found.weights, found.dproducts))
                if makes_dkv:
                    add(refs.dv_acc, keys, product(weights, 1, dout))  # dV += Pᵀ dO
                    add(refs.dk_acc, keys, product(dproducts, 1, q))  # dK += dSᵀ Q
                if makes_dq:
                    k = keep_seen(take(k_ref, keys, heads), found.seen, tokens)
                    dq.append(product(dproducts, 0, k))  # dQ += dS K
                for n, ref in dmod.items():
                    operand = rules.score_mod.operands[n]
                    add_gradient(operand, ref, found.operands[n], part, place)
            if makes_dq and walk.one_tile_per_query:
                put(refs.dq, queries, sum(dq) * rules.scale, heads, by_row=blocks.streamed)
            elif makes_dq:
                add(refs.dq_acc, queries, sum(dq))

    def may_be_empty(part: Part) -> bool:
        """Whether a query of the part may see nothing that is not zeroed outside."""
        if walk.empty_in_bands or not walk.empty_rows:
            return part.masked
        return part.masked or part.band not in (None, (None, None))

    def product(tile, contracted: int, array):
        """Of a score tile ``[keys, queries]`` and an array, over one of the tile's axes."""
        if blocks.streamed:
            return rules.product(tile, array, contracted, tokens)
        return rules.product(array, tile, tokens, contracted)

    def add(sum_ref, rows, more) -> None:
        if blocks.streamed:
            sum_ref[rows, :] += more
        else:
            sum_ref[:, rows] += more

    fill = functools.partial(fill_products, at=at, rules=rules, refs=refs, grid=grid)
    pipeline.run(walk, refs.tiles, at, fill, use)

    if makes_dq and not walk.one_tile_per_query:

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


def _finish(ref, sum_ref, rows, factor: float, grid: Grid) -> None:
    streamed = grid.walk.blocks.streamed
    total = sum_ref[rows, :] if streamed else sum_ref[:, rows]
    put(ref, rows, total * factor, grid.heads, by_row=streamed)


def fill_products(t, slot: int, parts, *, at, rules: Rules, refs: Refs, grid: Grid) -> None:
    """K Qᵀ and V dOᵀ of a tile, into its slot."""
    heads, place = grid.heads, place_of(t, refs.tiles, at, grid)
    dims = 1 - heads.token_axis
    for part in parts:
        q, dout = (take(x, place.queries(part), heads) for x in (refs.q, refs.dout))
        k, v = (take(x, place.keys(part), heads) for x in (refs.k, refs.v))
        products = rules.product(k, q, dims, dims)  # [keys, queries]
        refs.scores[slot, part.rows, part.queries] = rules.scaled(products)
        refs.dweights[slot, part.rows, part.queries] = rules.product(v, dout, dims, dims)


class ScoreGradients(NamedTuple):
    """Of a part. Arrays are float32 ``[keys, queries]``."""

    weights: Any  # P
    dscores: Any  # dS, the gradient of scores as the softmax sees them
    dproducts: Any  # that of scale · q·k, before ``score_mod`` and the cap
    operands: dict[int, Any]  # those of the floating operands of ``score_mod``, by their number
    seen: Any  # which keys are, as `hide` returns it


def score_gradients(slot: int, part: Part, place: Place, rules: Rules, refs: Refs):
    scaled = refs.scores[slot, part.rows, part.queries]
    scaled, pull = modified_with_gradient(scaled, part, place, rules, refs)
    scores, slope = rules.capped(scaled)
    scores, seen = hide(scores, part, place, rules, refs)
    queries = place.queries(part)
    weights = jnp.exp2(scores - refs.lse[:, queries])
    dscores = weights * (refs.dweights[slot, part.rows, part.queries] - refs.delta[:, queries])
    dscores = zero_hidden(dscores, scores, part)
    dproducts = dscores if slope is None else zero_hidden(dscores * slope, scores, part)
    dproducts, operands = pull(dproducts)
    if rules.score_mod.is_given:  # which may be NaN where hidden, and its derivative
        dproducts, *operands = (zero_hidden(x, scores, part) for x in (dproducts, *operands))
    by_number = dict(zip(rules.score_mod.floating, operands, strict=True))
    return ScoreGradients(weights, dscores, dproducts, by_number, seen)


def made_of_mod(rules: Rules, launch: Launch) -> tuple[int, ...]:
    """The operands of ``score_mod`` whose gradients a launch makes."""
    kinds = MAKES_OF_MOD.get(launch, ())
    mod = rules.score_mod
    return tuple(n for n in mod.floating if mod.operands[n].kind in kinds)


def backward(
    q, k, v, dout, lse, delta, bias, mods, walk: Walk, rules: Rules, heads: Heads, *,
    vmem_limit, interpret,
):  # fmt: skip
    """Gradients of padded arrays.

    Args:
      q, k, v, bias, mods, walk, rules, heads: as for `forward`.
      dout: cotangent of out, like it.
      lse: float32 ``[B, Hq, 1, Sq]`` in base 2, +inf in rows that see no key or do not exist.
      delta: float32 ``[B, Hq, 1, Sq]``, 0 in those rows, as q and dout are.

    Returns:
      ``dq, dk, dv`` like q, k, v, and by number those of floating operands of ``score_mod``,
      float32 ``[B, Hq, 1, …]``; of a number 128 partial sums.
    """
    arrays = (q, k, v, dout, lse, delta, bias, mods, walk, rules, heads)
    options = {"vmem_limit": vmem_limit, "interpret": interpret}
    if walk.num_kv == 1:
        dq, dk, dv, *more = _launch(*arrays, launch="backward", **options)
        return dq, dk, dv, dict(zip(made_of_mod(rules, "backward"), more, strict=True))
    dq, *by_query = _launch(*arrays, launch="backward_dq", **options)
    dk, dv, *by_key = _launch(*arrays, launch="backward_dk_dv", **options)
    made = made_of_mod(rules, "backward_dq") + made_of_mod(rules, "backward_dk_dv")
    return dq, dk, dv, dict(zip(made, by_query + by_key, strict=True))


def _launch(
    q, k, v, dout, lse, delta, bias, mods, walk: Walk, rules: Rules, heads: Heads, *,
    launch: Launch, vmem_limit, interpret,
):  # fmt: skip
    blocks, makes = walk.blocks, MAKES[launch]
    made = {rules.score_mod.operands[n].kind for n in made_of_mod(rules, launch)}
    if launch == "backward_dq":
        over_queries = any("i" in SUMMED_OVER[kind] for kind in made)
        grid = Grid.by_queries(heads, walk, over_queries=over_queries)
    else:
        grid = Grid.by_keys(heads, walk, head_by_head="kv" in made or walk.num_kv == 1)
    inputs = inputs_of(grid, rules, q, k, v, dout, lse, delta, bias, mods)
    tile = pltpu.VMEM((2, *walk.tile_shape), jnp.float32)
    outputs, scratch = [], {"scores": tile, "dweights": tile}
    for name, like, block, length in (
        ("dq", q, grid.by_query, blocks.major_q),
        ("dk", k, grid.by_key, blocks.major_kv),
        ("dv", v, grid.by_key, blocks.major_kv),
    ):
        if name in makes:
            dim = heads.Dv if name == "dv" else heads.D
            outputs.append(block(name, jax.ShapeDtypeStruct(like.shape, like.dtype), dim))
            if name == "dq" and walk.one_tile_per_query:
                continue
            sums = (length, dim) if blocks.streamed else (dim, length)
            scratch[f"{name}_acc"] = pltpu.VMEM(sums, jnp.float32)
    for n in made_of_mod(rules, launch):
        operand, x = rules.score_mod.operands[n], mods[1][n]
        length = LANES if operand.kind == "number" else x.shape[3]
        out = jax.ShapeDtypeStruct((heads.B, heads.Hq, 1, length), jnp.float32)
        outputs.append(grid.like_operand("dscore_mod", operand.kind, out))
    return grid.call(
        functools.partial(kernel, launch=launch),
        inputs,
        outputs,
        scratch,
        rules=rules,
        products=2 + len(makes),
        name=f"smalti_attention_{launch}",
        vmem_limit_bytes=vmem_limit,
        interpret=interpret,
    )


def inputs_of(grid: Grid, rules: Rules, q, k, v, dout, lse, delta, bias, mods) -> list[Block]:
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
        *grid.mods(rules, mods, bias),
    ]
