"""One step of the walk, shared by forward and backward: where it stands, its keys, its scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from smalti.attention.blockwise.walk import Walk
from smalti.attention.mods import Mods
from smalti.masks.tiles import TileIndex, int32s
from smalti.varying import vary_like

# Axes of every product here: batch entries and key heads ride along as batch dimensions.
_BATCH = ((0, 1), (0, 1))


def product(a, b, contract_a: int, contract_b: int, precision):
    """float32 ``[B, Hkv, …]`` product of two ``[B, Hkv, x, y]`` over one axis of each."""
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), _BATCH),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def take_queries(array, walk: Walk, row):
    """The row's queries of ``[B, Hkv, G, Sq, …]``, groups folded into rows:
    ``[num_b, num_h, G * block_q, …]``."""
    group, block_q = array.shape[2], walk.grid.block_q
    start = (*_group_start(walk, row, array), 0, walk.row_q[row] * block_q)
    sizes = (walk.num_b, walk.num_h, group, block_q, *array.shape[4:])
    start = (*start, *(0,) * (array.ndim - 4))
    tile = lax.dynamic_slice(array, int32s(*start), sizes)
    return tile.reshape(walk.num_b, walk.num_h, group * block_q, *array.shape[4:])


def take_keys(array, walk: Walk, row, chunk):
    """The chunk's keys of ``[B, Hkv, Sk, D]``: ``[num_b, num_h, n * block_kv, D]``.

    A tile past the end is cut back to the last one, as slices are; `hide` hides it.
    """
    block_kv = walk.grid.block_kv
    sizes = (walk.num_b, walk.num_h, block_kv, array.shape[3])
    start = _group_start(walk, row, array)
    parts = [
        lax.dynamic_slice(array, int32s(*start, walk.tiles[chunk, i] * block_kv, 0), sizes)
        for i in range(walk.chunk_tiles)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)


def add_keys(total, update, walk: Walk, row, chunk):
    """``total [B, Hkv, Sk, D]`` with ``update [num_b, num_h, n * block_kv, D]`` added where
    `take_keys` takes; what is past the chunk's tiles must be 0."""
    block_kv = walk.grid.block_kv
    for i in range(walk.chunk_tiles):
        part = update[:, :, i * block_kv : (i + 1) * block_kv]
        start = int32s(*_group_start(walk, row, total), walk.tiles[chunk, i] * block_kv, 0)
        old = lax.dynamic_slice(total, start, part.shape)
        total = lax.dynamic_update_slice(total, old + part, start)
    return total


def index_of(walk: Walk, row, chunk, group: int) -> TileIndex:
    whole_batch, whole_heads = _covers(walk, walk.grid.heads // group)
    return TileIndex(
        b_start=0 if whole_batch else walk.row_batch[row],
        h_start=0 if whole_heads else walk.row_head[row] * group,
        q_start=walk.row_q[row] * walk.grid.block_q,
        kv_tiles=walk.tiles[chunk],
        num_b=walk.num_b,
        num_h=walk.num_h * group,
        block_q=walk.grid.block_q,
        block_kv=walk.grid.block_kv,
    )


# Score tiles come in two orientations, so that every product reads its left operand by rows (a CPU
# multiplies a transposed one at a third of the rate): queries first, [num_b, num_h, G * block_q,
# keys], for the forward; keys first, [num_b, num_h, keys, G * block_q], for the backward. Masks,
# biases and score_mods know heads: [num_b, Hq, block_q, keys].


def from_heads(tile, walk: Walk, group: int, keys_first: bool):
    """``[num_b or 1, Hq or 1, block_q, keys]`` as ``[num_b or 1, num_h or 1, G or 1, block_q,
    keys]`` or, keys first, ``[…, keys, G or 1, block_q]``: broadcasts to `split_rows`."""
    heads = (1, 1) if tile.shape[1] == 1 else (walk.num_h, group)
    tile = tile.reshape(tile.shape[0], *heads, *tile.shape[2:])
    return jnp.moveaxis(tile, 4, 2) if keys_first else tile


def split_rows(scores, group: int, keys_first: bool):
    """A score tile with rows split into (G, block_q)."""
    b, h, x, y = scores.shape
    return scores.reshape(
        (b, h, x, group, y // group) if keys_first else (b, h, group, x // group, y)
    )


def to_heads(scores, group: int, keys_first: bool):
    """A score tile as ``[num_b, Hq, block_q, keys]``."""
    scores = split_rows(scores, group, keys_first)
    scores = jnp.moveaxis(scores, 2, 4) if keys_first else scores
    return scores.reshape(scores.shape[0], -1, *scores.shape[3:])


def score(products, mods: Mods, walk: Walk, index: TileIndex, *, keys_first: bool):
    """Scores before bias and mask from a tile of ``q·k``, float32; −inf where score_mod hides."""
    scores = products * mods.scale
    if mods.score_mod is None:
        return mods.cap(scores)
    group = index.num_h // walk.num_h
    # A product that is not finite comes from a query or key that is not. Whether score_mod hides it
    # must not hang on that (NaN − inf = NaN), and if it does not, the row is spoiled.
    finite = jnp.isfinite(scores)
    by_head = mods.score_mod.over_scores(
        to_heads(jnp.where(finite, scores, 0), group, keys_first),
        index.b,
        index.h,
        index.q_idx,
        index.kv_idx,
    ).astype(jnp.float32)
    scores = from_heads(by_head, walk, group, keys_first).reshape(products.shape)
    hidden = scores == -jnp.inf  # before the cap, which would make it −softcap
    return jnp.where(hidden, -jnp.inf, jnp.where(finite, mods.cap(scores), jnp.nan))


def hide(scores, mods: Mods, walk: Walk, chunk, index: TileIndex, *, keys_first: bool):
    """Add the bias and set hidden scores to −inf.

    Args:
      scores: a score tile, float32.

    Returns:
      The scores, and ``seen [num_b or 1, num_h or 1, keys]``: whether any query of the step sees
      the key. None where every query sees every key of every chunk.
    """
    group = index.num_h // walk.num_h

    def cut(scores):
        visible = mods.mask.tile(index)  # [num_b or 1, Hq or 1, block_q, keys]
        visible = visible & (index.kv_idx < walk.grid.kv_len)[None, None, None, :]
        if walk.grid.q_len % walk.grid.block_q:
            visible = visible & (index.q_idx < walk.grid.q_len)[None, None, :, None]
        rows = split_rows(scores, group, keys_first)
        visible = from_heads(visible, walk, group, keys_first)
        if mods.bias is not None:
            bias = index.slice(mods.bias).astype(jnp.float32)
            bias = from_heads(bias, walk, group, keys_first)
            rows = rows + bias
            visible = visible & (bias != -jnp.inf)
        if mods.may_hide:
            visible = visible & (rows != -jnp.inf)
        seen = vary_like(visible.any((3, 4) if keys_first else (2, 3)), scores)
        return jnp.where(visible, rows, -jnp.inf).reshape(scores.shape), seen

    def whole(scores):
        seen = jnp.ones(jax.eval_shape(cut, scores)[1].shape, bool)
        return scores, vary_like(seen, scores)

    if mods.may_hide or not walk.some_whole:
        return cut(scores)
    if not walk.some_cut:
        return scores, None
    return lax.cond(walk.whole[chunk], whole, cut, scores)


def keep_seen(array, seen):
    """``array [num_b, num_h, keys, D]`` with keys that nobody sees at 0, even if they are NaN."""
    return array if seen is None else jnp.where(seen[..., None], array, 0)


def _covers(walk: Walk, kv_heads: int) -> tuple[bool, bool]:
    """Whether one group holds (all batch entries, all key heads): then starts are constant."""
    return walk.num_b == walk.grid.batch, walk.num_h == kv_heads


def _group_start(walk: Walk, row, array):
    whole_batch, whole_heads = _covers(walk, array.shape[1])
    return 0 if whole_batch else walk.row_batch[row], 0 if whole_heads else walk.row_head[row]
