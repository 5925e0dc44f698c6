"""What kernels read of masks, ``score_mod`` and biases: blocks of it in the shape of a tile."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu.mods import KernelMod, Operand
from smalti.attention.tpu.place import Place
from smalti.attention.tpu.tiles import Part, Walk
from smalti.tpu.lanes import LANES, SUBLANES, round_up


def load(operand: Operand, ref, part: Part, place: Place):
    """An operand for a part of a tile; broadcasts to ``[keys, queries]``."""
    if operand.kind == "number":
        batch, heads = ref.shape
        return ref[place.b if batch > 1 else 0, place.h if heads > 1 else 0]
    if operand.kind == "q":
        return ref[:, place.queries(part)]
    if operand.kind == "kv":
        return to_column(ref[:, place.keys(part)])
    if operand.kind == "relative":
        keys, queries = part.kv_stop - part.kv_start, part.q_stop - part.q_start
        return _by_difference(ref[:, place.differences(part)], keys, queries)
    return bias_tile(ref, place.queries(part), place.keys(part))


def _by_difference(row, keys: int, queries: int):
    """``[keys, queries]`` of a row by ``query − key``, that of ``−keys`` first."""
    length = row.shape[1]
    first = length - queries  # where the difference is 0
    # Row r of 128 is the row moved by r; those below are the same, 128 lanes on.
    moved = jnp.broadcast_to(row, (LANES, length))
    moved = pltpu.roll(moved, 0, 1, stride=1, stride_axis=0)
    rows = [
        moved[: min(LANES, keys - start), first - start : first - start + queries]
        for start in range(0, keys, LANES)
    ]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)


def add_gradient(operand: Operand, ref, tile, part: Part, place: Place) -> None:
    """Add the gradient ``tile [keys, queries]`` of a loaded operand to that of all of it."""
    if operand.kind == "kv":
        ref[:, place.keys(part)] += to_row(tile.sum(1, keepdims=True))
    elif operand.kind == "relative":
        ref[:, place.differences(part)] += _sum_by_difference(tile)
    elif operand.kind == "q":
        ref[:, place.queries(part)] += tile.sum(0, keepdims=True)
    else:
        row = tile.sum(0, keepdims=True)
        ref[...] += sum(row[:, n : n + LANES] for n in range(0, row.shape[1], LANES))


def _sum_by_difference(tile):
    """The transpose of `_by_difference`: ``[1, keys + queries]``."""
    keys, queries = tile.shape
    length = round_up(keys) + queries
    moved = jnp.zeros((LANES, length), jnp.float32)
    for start in range(0, keys, LANES):
        rows = tile[start : start + LANES]
        rows = jnp.pad(rows, ((0, LANES - rows.shape[0]), (0, 0)))
        before = length - queries - start
        moved = moved + jnp.pad(rows, ((0, 0), (before, length - queries - before)))
    # Row r goes back by r. `roll` goes forward only, the further the further down: with the rows in
    # reverse order that is by length − r, all around.
    reverse = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0) + lax.broadcasted_iota(
        jnp.int32, (LANES, LANES), 1
    )
    reverse = jnp.where(reverse == LANES - 1, 1.0, 0.0)
    moved = lax.dot_general(
        reverse, moved, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    back = pltpu.roll(moved, length - (LANES - 1), 1, stride=1, stride_axis=0)
    return back.sum(0, keepdims=True)


def bias_tile(ref, q_at, kv_at):
    """``[keys or 1, queries or 1]`` float32 of a bias block ``[queries or 1, keys or 1]``."""
    num_q, num_kv = ref.shape
    block = ref[q_at if num_q > 1 else slice(None), kv_at if num_kv > 1 else slice(None)]
    block = block.astype(jnp.float32)
    if num_q == 1 and num_kv == 1:
        return block
    if num_q == 1:
        return to_column(block)
    if num_kv == 1:
        return to_row(block)
    return block.T


def to_column(x):
    """``[1, n]`` as ``[n, 1]``."""
    return jnp.broadcast_to(x, (SUBLANES, x.shape[1])).T[:, :1]


def to_row(x):
    """``[n, 1]`` as ``[1, n]``."""
    return jnp.broadcast_to(x, (x.shape[0], LANES)).T[:1]


def padded(mod: KernelMod, arrays, walk: Walk) -> tuple:
    """A mod's operands, padded as queries and keys are."""
    found = []
    for operand, x in zip(mod.operands, arrays, strict=True):
        if operand.kind == "q":
            x = _pad(x.swapaxes(2, 3), 3, 0, walk.q_padded)
        elif operand.kind == "kv":
            x = _pad(x, 3, 0, walk.kv_padded)
        elif operand.kind == "relative":
            x = _pad(x, 3, walk.kv_padded - (walk.kv_len - 1), walk.kv_padded + walk.q_padded)
        elif operand.kind == "scores":
            x = _pad(_pad(x, 2, 0, walk.q_padded), 3, 0, walk.kv_padded)
        found.append(x)
    return tuple(found)


def summed(operand: Operand, gradient, like, walk: Walk):
    """What the kernels made of an operand's gradient, ``[B, Hq, 1, …]``, in its own shape."""
    if operand.kind == "number":
        gradient = gradient.sum(3, keepdims=True)
    elif operand.kind == "q":
        gradient = gradient[..., : walk.q_len].swapaxes(2, 3)
    elif operand.kind == "kv":
        gradient = gradient[..., : walk.kv_len]
    else:
        first = walk.kv_padded - (walk.kv_len - 1)
        gradient = gradient[..., first : first + like.shape[3]]
    axes = tuple(n for n in (0, 1) if like.shape[n] == 1)
    return gradient.sum(axes, keepdims=True)


def _pad(x, axis: int, before: int, length: int):
    after = length - before - x.shape[axis]
    return jnp.pad(x, [(before, after) if n == axis else (0, 0) for n in range(x.ndim)])
