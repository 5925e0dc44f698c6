"""The gradient of a bias: ``dS`` summed over the axes along which the bias is broadcast.

A launch of its own, in an order in which all steps that add to a block of the result follow each
other, so that it is summed in VMEM and nothing of the size of the scores is ever in HBM.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu import pipeline
from smalti.attention.tpu.backward import fill_products, inputs_of, score_gradients
from smalti.attention.tpu.grid import Grid, Refs
from smalti.attention.tpu.layout import Heads
from smalti.attention.tpu.operands import to_row
from smalti.attention.tpu.place import place_of
from smalti.attention.tpu.scores import Rules
from smalti.attention.tpu.tiles import Walk


def kernel(refs: Refs, *, rules: Rules, grid: Grid):
    # The other refs are as in `backward.kernel`.
    dbias_ref = refs.dbias  # [major_q or 1, major_kv or 1] float32
    walk, blocks = grid.walk, grid.walk.blocks
    num_q, num_kv = dbias_ref.shape
    assert num_q in (1, blocks.major_q), dbias_ref.shape
    assert num_kv in (1, blocks.major_kv), dbias_ref.shape
    at = grid.ids(refs)

    @pl.when(grid.is_first(at, *grid.sums))
    def _():
        dbias_ref[...] = jnp.zeros(dbias_ref.shape, jnp.float32)

    def use(t, slot, parts):
        place = place_of(t, refs.tiles, at, grid)
        for part in parts:
            dscores = score_gradients(slot, part, place, rules, refs).dscores
            if num_q == 1:
                dscores = to_row(dscores.sum(1, keepdims=True))  # [1, keys]
                dscores = dscores.sum(1, keepdims=True) if num_kv == 1 else dscores
            elif num_kv == 1:
                dscores = dscores.sum(0, keepdims=True).T
            else:
                dscores = dscores.T
            queries = place.queries(part) if num_q > 1 else slice(None)
            keys = place.keys(part) if num_kv > 1 else slice(None)
            dbias_ref[queries, keys] += dscores

    fill = functools.partial(fill_products, at=at, rules=rules, refs=refs, grid=grid)
    pipeline.run(walk, refs.tiles, at, fill, use)


def bias_gradient(
    q, k, v, dout, lse, delta, bias, mods, walk: Walk, rules: Rules, heads: Heads, *,
    vmem_limit, interpret,
):  # fmt: skip
    """``dbias`` float32, of the shape of ``bias``. Arguments as for `backward`."""
    shape = bias.shape
    own = {"b": shape[0] > 1, "hkv": shape[1] > 1, "g": shape[1] > 1}
    own |= {"i": shape[2] > 1, "j": shape[3] > 1}
    order = tuple(sorted(own, key=lambda axis: not own[axis]))
    grid = Grid(heads, walk, order, sums=order[sum(own.values()) :])
    tile = pltpu.VMEM((2, *walk.tile_shape), jnp.float32)
    (dbias,) = grid.call(
        kernel,
        inputs_of(grid, rules, q, k, v, dout, lse, delta, bias, mods),
        [grid.like_bias("dbias", jax.ShapeDtypeStruct(shape, jnp.float32), fetched=False)],
        {"scores": tile, "dweights": tile},
        rules=rules,
        products=2,
        name="smalti_attention_bias_gradient",
        vmem_limit_bytes=vmem_limit,
        interpret=interpret,
    )
    return dbias
