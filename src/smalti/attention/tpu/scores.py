"""From products of keys and queries to scores, inside of a kernel.

Score tiles are transposed, ``[keys, queries]``: what belongs to a query (largest score, sum,
logsumexp) then lies along the lanes of one row and meets the tile without a broadcast across lanes,
and maxima and sums over keys are plain element operations. Scores are in base 2: ``exp(x)`` is
``exp2(x · log2 e)``, and the factor goes into the scale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from smalti.attention.tpu import masking
from smalti.attention.tpu.tiles import Band, Part, Walk

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
# Finite, so that no difference of two scores is NaN.
HIDDEN = float(np.finfo(np.float32).min)
# The largest score of a row that has seen no key yet: hidden ones weigh exp2(HIDDEN − EMPTY_MAX),
# which is 0.
EMPTY_MAX = (1 - 2**-20) * HIDDEN
# What is seen is above, whatever its bias.
LOWEST = (1 - 2**-19) * HIDDEN


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is fixed about scores when a kernel is traced."""

    scale: float
    softcap: float | None
    mask: masking.Form
    q_len: int  # queries that exist
    kv_len: int  # keys
    precision: Any  # of products

    def product(self, a, b, contract_a: int, contract_b: int):
        """``a · b`` over one axis of each, float32."""
        return lax.dot_general(
            a,
            b,
            (((contract_a,), (contract_b,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def scaled(self, products):
        """In base 2, or, where a cap is to come, what its tanh takes."""
        if self.softcap is None:
            return products * (self.scale * LOG2_E)
        return products * (self.scale / self.softcap)

    def capped(self, scaled):
        """Scores in base 2 and the derivative of the cap, or None without one."""
        if self.softcap is None:
            return scaled, None
        tanh = jnp.tanh(scaled)
        return tanh * (self.softcap * LOG2_E), 1.0 - tanh * tanh


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile is, inside of a kernel."""

    b: Any  # batch entry
    q: Any  # its first query, in the major block
    kv: Any  # its first key, in the major block
    q_global: Any  # the same in the sequence
    kv_global: Any

    def queries(self, part: Part):
        return pl.ds(self.q + part.q_start, part.q_stop - part.q_start)

    def keys(self, part: Part):
        return pl.ds(self.kv + part.kv_start, part.kv_stop - part.kv_start)


def place_of(t, tiles_ref, at, walk: Walk) -> Place:
    """The place of tile ``t`` of the list, in the step that is at ``at``."""
    blocks, tile = walk.blocks, tiles_ref[0, walk.num_counts + t]
    q = pl.multiple_of((tile >> 16) * blocks.block_q, blocks.block_q)
    kv = pl.multiple_of((tile & 0xFFFF) * blocks.block_kv, blocks.block_kv)
    return Place(at.b, q, kv, at.i * blocks.major_q + q, at.j * blocks.major_kv + kv)


def hide(scores, part: Part, place: Place, rules: Rules, refs):
    """``scores [keys, queries]`` of a part with bias added and hidden ones at `HIDDEN`.

    Returns the scores and ``seen``, bool ``[1, keys]``: whether any query of the part sees the key;
    None where all are seen.
    """
    if part.masked:
        return _hide_by_mask(scores, part, place, rules, refs)
    if part.band is not None:
        scores = _outside_band(scores, part, part.band, HIDDEN)
    if part.seen is None:
        return scores, None
    keys = lax.broadcasted_iota(jnp.int32, (1, scores.shape[0]), 1) + part.kv_start
    return scores, (keys >= part.seen[0]) & (keys < part.seen[1])


def zero_hidden(dscores, scores, part: Part):
    """The gradient of scores that `hide` returned, 0 where they are hidden, even if it is NaN:
    a value that nobody sees may be, or a cotangent of its query."""
    if part.masked:
        return jnp.where(scores == HIDDEN, 0.0, dscores)
    return dscores if part.band is None else _outside_band(dscores, part, part.band, 0.0)


def _outside_band(tile, part: Part, band: Band, value: float):
    """``tile [keys, queries]`` with ``value`` outside of the band. Only the rows of 128 keys that
    hold an edge of the band are compared."""
    low, high = band
    stop = part.seen[1] if part.seen is not None else part.kv_stop
    rows, pieces = 128, []
    for first in range(part.kv_start, part.kv_stop, rows):
        last = min(first + rows, part.kv_stop) - 1
        piece = tile[first - part.kv_start : last + 1 - part.kv_start]
        key = lax.broadcasted_iota(jnp.int32, piece.shape, 0)
        query = lax.broadcasted_iota(jnp.int32, piece.shape, 1)
        difference, offset = key - query, first - part.q_start  # key − query is their sum
        keep = None
        if high is not None and last - part.q_start > high:
            keep = difference <= high - offset
        if low is not None and first - (part.q_stop - 1) < low:
            keep = _and(keep, difference >= low - offset)
        if last >= stop:
            keep = _and(keep, key < stop - first)
        pieces.append(piece if keep is None else jnp.where(keep, piece, value))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)


def _hide_by_mask(scores, part: Part, place: Place, rules: Rules, refs):
    q_first, kv_first = place.q_global + part.q_start, place.kv_global + part.kv_start
    num_kv, num_q = scores.shape
    q_idx = q_first + lax.broadcasted_iota(jnp.int32, (1, num_q), 1)
    kv_idx = kv_first + lax.broadcasted_iota(jnp.int32, (num_kv, 1), 0)
    q_at, kv_at = place.queries(part), place.keys(part)
    numbers, ids = [], []
    if refs.numbers is not None:
        count, batch = refs.numbers.shape
        numbers = [refs.numbers[n, place.b if batch > 1 else 0] for n in range(count)]
    if refs.q_ids is not None:
        for n in range(refs.q_ids.shape[0]):
            ids.append((refs.q_ids[n, :, q_at], to_column(refs.kv_ids[n, :, kv_at])))
    visible = masking.visible(rules.mask, numbers, ids, q_idx, kv_idx) & (kv_idx < rules.kv_len)
    visible = visible & (q_idx < rules.q_len)  # what these see may be NaN where nobody else sees it
    if refs.bias is not None:
        bias = bias_tile(refs.bias, q_at, kv_at)
        visible = visible & (bias != -jnp.inf) & (scores != -jnp.inf)
        scores = jnp.maximum(scores + bias * LOG2_E, LOWEST)
    visible = jnp.broadcast_to(visible, scores.shape)
    # Counted by a product: its result lies along lanes, as a row of keys must.
    ones = jnp.ones((8, num_q), jnp.bfloat16)
    seen = _counted(ones, jnp.where(visible, 1.0, 0.0).astype(jnp.bfloat16))[:1] > 0
    return jnp.where(visible, scores, HIDDEN), seen


def _counted(rows, tile):
    """``rows [n, queries] · tile [keys, queries]ᵀ``, for whole numbers that bfloat16 holds."""
    return lax.dot_general(
        rows,
        tile,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


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
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]


def to_row(x):
    """``[n, 1]`` as ``[1, n]``."""
    return jnp.broadcast_to(x, (x.shape[0], 128)).T[:1]


def _and(a, b):
    return b if a is None else a & b


def keep_seen(array, seen, keys_axis: int):
    """``array [D, keys]`` or ``[keys, D]`` with keys that no query sees at 0, even if they are
    NaN."""
    if seen is None:
        return array
    if keys_axis == 0:
        seen = to_column(seen.astype(jnp.float32)) > 0
    return jnp.where(seen, array, jnp.zeros((), array.dtype))
