"""Forward of `blockwise`: FlashAttention-2's loop (arXiv:2307.08691, algorithm 1) in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from smalti.attention.blockwise import steps
from smalti.attention.blockwise.walk import Walk
from smalti.attention.mods import Mods
from smalti.attention.online_softmax import State, finish, update
from smalti.varying import vary_like


def forward(q, k, v, mods: Mods, walk: Walk, precision):
    """Attention over the tiles of the walk.

    Args:
      q: ``[B, Hkv, G, Sq, D]``, Sq padded to whole tiles (as all lengths here).
      k, v: ``[B, Hkv, Sk, D]`` and ``[B, Hkv, Sk, Dv]``.
      mods: scale, score_mod, softcap, bias (padded) and mask.
      walk: the live tiles.

    Returns:
      ``out [B, Hkv, G, Sq, Dv]``, ``lse [B, Hkv, G, Sq]`` and the correction of weights made
      with it (`online_softmax.finish`), like it; float32, padded.
    """
    group, block_q = q.shape[2], walk.grid.block_q
    rows = (walk.num_b, walk.num_h, group * block_q)
    shapes = ((rows, -jnp.inf), (rows, 0), ((*rows, v.shape[3]), 0))
    empty = vary_like(State(*(jnp.full(shape, fill, jnp.float32) for shape, fill in shapes)), q)

    def row(_, r):
        q_tile = steps.take_queries(q, walk, r)  # [num_b, num_h, G * block_q, D]

        def chunk(c, state):
            index = steps.index_of(walk, r, c, group)
            keys, values = (steps.take_keys(x, walk, r, c) for x in (k, v))
            products = steps.product(q_tile, keys, 3, 3, precision)
            scores = steps.score(products, mods, walk, index, keys_first=False)
            scores, seen = steps.hide(scores, mods, walk, c, index, keys_first=False)
            values = steps.keep_seen(values, seen)

            def weigh_values(weights):
                return steps.product(weights.astype(v.dtype), values, 3, 2, precision)

            return update(state, scores, weigh_values)

        state = lax.fori_loop(walk.row_start[r], walk.row_stop[r], chunk, empty)
        return None, finish(state)

    _, found = lax.scan(row, None, jnp.arange(len(walk.row_q), dtype=jnp.int32))
    return tuple(join_rows(x, walk, group) for x in found)


def join_rows(x, walk: Walk, group: int):
    """``[rows, num_b, num_h, G * block_q, …]`` as ``[B, Hkv, G, Sq, …]``, Sq padded."""
    grid = walk.grid
    num_bs, num_hs = grid.batch // walk.num_b, grid.heads // group // walk.num_h
    x = x.reshape(
        num_bs, num_hs, grid.num_q, walk.num_b, walk.num_h, group, grid.block_q, *x.shape[4:]
    )
    x = jnp.moveaxis(x, (0, 3, 1, 4, 5, 2, 6), range(7))
    return x.reshape(
        grid.batch, grid.heads // group, group, grid.num_q * grid.block_q, *x.shape[7:]
    )
