"""Backward of `blockwise`: recomputes the weights tile by tile from the saved logsumexp
(FlashAttention-2, arXiv:2307.08691, algorithm 2), one walk for all gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smalti.attention.blockwise import steps
from smalti.attention.blockwise.forward import join_rows
from smalti.attention.blockwise.walk import Walk
from smalti.attention.mods import Mods
from smalti.masks.tiles import TileIndex
from smalti.varying import vary_like


class Totals(NamedTuple):
    """Gradients that many rows add to, float32."""

    dk: Any  # [B, Hkv, Sk, D]
    dv: Any  # [B, Hkv, Sk, Dv]
    dbias: Any  # like bias, or None
    dcaptured: Any  # like the floating captured arrays of score_mod


def backward(q, k, v, dout, lse, delta, mods: Mods, walk: Walk, precision):
    """Gradients of `forward`, all float32.

    Args:
      q, k, v, mods, walk: as for `forward`.
      dout: cotangent of out, ``[B, Hkv, G, Sq, Dv]``.
      lse: ``[B, Hkv, G, Sq]``; −inf in rows that see no key. They pass nothing on, whatever their
        q, dout and delta hold.
      delta: ``rowsum(out · dout) − dlse``, ``[B, Hkv, G, Sq]``.

    Returns:
      ``dq`` like q, and the `Totals`.
    """
    group, block_q = q.shape[2], walk.grid.block_q
    floats = [] if mods.score_mod is None else mods.score_mod.floating
    zero = vary_like(
        Totals(
            jnp.zeros(k.shape, jnp.float32),
            jnp.zeros(v.shape, jnp.float32),
            None if mods.bias is None else jnp.zeros(mods.bias.shape, jnp.float32),
            [jnp.zeros(x.shape, jnp.float32) for x in floats],
        ),
        q,
    )
    # Kept as [D, rows]: with keys first, that product too reads its left operand by rows.
    no_dq = jnp.zeros((walk.num_b, walk.num_h, q.shape[4], group * block_q), jnp.float32)
    no_dq = vary_like(no_dq, q)

    def row(totals, r):
        q_tile, do_tile, lse_tile, delta_tile = (
            steps.take_queries(x, walk, r) for x in (q, dout, lse, delta)
        )
        empty = lse_tile == -jnp.inf
        q_tile, do_tile = (jnp.where(empty[..., None], 0, x) for x in (q_tile, do_tile))
        # Rows are along the lanes here; exp(−inf − 0) = 0.
        lse_tile, delta_tile = (
            jnp.where(empty, 0, x)[..., None, :] for x in (lse_tile, delta_tile)
        )

        def chunk(c, carry):
            dq, totals = carry
            index = steps.index_of(walk, r, c, group)
            keys, values = (steps.take_keys(x, walk, r, c) for x in (k, v))
            products = steps.product(keys, q_tile, 3, 3, precision)  # […, keys, G * block_q]
            scores, pull = jax.vjp(
                lambda x: steps.score(x, mods, walk, index, keys_first=True), products
            )
            scores, seen = steps.hide(scores, mods, walk, c, index, keys_first=True)
            hidden = scores == -jnp.inf

            weights = jnp.where(hidden, 0, jnp.exp(scores - lse_tile))
            dv = steps.product(weights.astype(v.dtype), do_tile, 3, 2, precision)
            dweights = steps.product(values, do_tile, 3, 3, precision)
            dscores = jnp.where(hidden, 0, weights * (dweights - delta_tile))

            dbias = totals.dbias
            if dbias is not None:
                dbias = _add_bias(dbias, steps.to_heads(dscores, group, True), index)
            dcaptured = totals.dcaptured
            if dcaptured:
                more = _captured(
                    steps.to_heads(products, group, True),
                    steps.to_heads(dscores, group, True),
                    steps.to_heads(~hidden, group, True),
                    mods,
                    index,
                    floats,
                )
                dcaptured = [a + b for a, b in zip(dcaptured, more, strict=True)]

            (dproducts,) = pull(dscores)
            dproducts = jnp.where(hidden, 0, dproducts).astype(k.dtype)
            dk = steps.product(dproducts, q_tile, 3, 2, precision)
            columns = steps.keep_seen(keys, seen).swapaxes(2, 3)  # [num_b, num_h, D, keys]
            dq = dq + steps.product(columns, dproducts, 3, 2, precision)
            totals = Totals(
                steps.add_keys(totals.dk, steps.keep_seen(dk, seen), walk, r, c),
                steps.add_keys(totals.dv, steps.keep_seen(dv, seen), walk, r, c),
                dbias,
                dcaptured,
            )
            return dq, totals

        dq, totals = lax.fori_loop(walk.row_start[r], walk.row_stop[r], chunk, (no_dq, totals))
        return totals, dq.swapaxes(2, 3)

    totals, dq = lax.scan(row, zero, jnp.arange(len(walk.row_q), dtype=jnp.int32))
    return join_rows(dq, walk, group), totals


def _add_bias(dbias, dscores, index: TileIndex):
    """Add ``dscores [num_b, Hq, block_q, keys]`` to the bias's own broadcast shape."""
    axes = tuple(axis for axis in range(3) if dbias.shape[axis] == 1)
    for i in range(index.kv_tiles.shape[0]):
        part = dscores[..., i * index.block_kv : (i + 1) * index.block_kv].sum(axes, keepdims=True)
        if dbias.shape[3] == 1:
            part = part.sum(3, keepdims=True)
        start, _ = index.starts(dbias.shape, index.kv_tiles[i])
        old = lax.dynamic_slice(dbias, start, part.shape)
        dbias = lax.dynamic_update_slice(dbias, old + part, start)
    return dbias


def _captured(products, dscores, visible, mods: Mods, index: TileIndex, floats):
    """Gradients to the floating arrays that score_mod captured, from one step.

    At hidden positions score_mod may be anything, and 0 times its derivative NaN. There it is
    evaluated at one of the visible positions instead, so that what is multiplied by 0 is finite.
    """
    score_mod = mods.score_mod
    assert score_mod is not None
    axes = jnp.broadcast_arrays(
        products * mods.scale,
        index.b[:, None, None, None],
        index.h[None, :, None, None],
        index.q_idx[:, None],
        index.kv_idx[None, :],
    )
    flat = [x.reshape(-1) for x in axes]
    pick, seen = jnp.argmax(visible), visible.reshape(-1)
    flat = [jnp.where(seen, x, x[pick]) for x in flat]

    def score(floats):
        mod = score_mod.with_floating(floats)
        return mods.cap(jax.vmap(mod.call)(*flat).astype(jnp.float32))

    def gradients():
        _, pull = jax.vjp(score, floats)
        (grads,) = pull(dscores.reshape(-1))
        return [x.astype(jnp.float32) for x in grads]

    def nothing():
        return vary_like([jnp.zeros(x.shape, jnp.float32) for x in floats], products)

    return lax.cond(visible.any(), gradients, nothing)
