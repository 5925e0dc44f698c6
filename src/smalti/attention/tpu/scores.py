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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smalti.attention.tpu.mods import KernelMod
from smalti.attention.tpu.operands import bias_tile, load, to_column
from smalti.attention.tpu.place import Place
from smalti.attention.tpu.tiles import Band, Part
from smalti.tpu.lanes import LANES

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
    mask: KernelMod
    score_mod: KernelMod
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
        """In base 2, or, where a cap is to come, what its tanh takes; for a ``score_mod``, its
        scores."""
        if self.score_mod.is_given:
            return products * self.scale
        if self.softcap is None:
            return products * (self.scale * LOG2_E)
        return products * (self.scale / self.softcap)

    def capped(self, scaled):
        """Scores in base 2 and the derivative of the cap, or None without one."""
        if not self.score_mod.is_given:
            hidden = None
        else:
            hidden = scaled == -jnp.inf  # and a cap leaves it so
            scaled = scaled * (LOG2_E if self.softcap is None else 1 / self.softcap)
        if self.softcap is None:
            if hidden is not None:  # by −inf; what is not hidden stays finite in base 2
                scaled = jnp.where(hidden, scaled, jnp.maximum(scaled, LOWEST))
            return scaled, None
        tanh = jnp.tanh(scaled)
        scores = tanh * (self.softcap * LOG2_E)
        if hidden is not None:
            scores = jnp.where(hidden, -jnp.inf, scores)
        return scores, 1.0 - tanh * tanh


def modified(scaled, part: Part, place: Place, rules: Rules, refs):
    """``scaled``, as `Rules.scaled` gives it, after ``score_mod``."""
    if not rules.score_mod.is_given:
        return scaled
    operands = _loaded(rules.score_mod, refs.score_mod, part, place)
    return _apply(rules.score_mod, scaled, operands, part, place)


def modified_with_gradient(scaled, part: Part, place: Place, rules: Rules, refs):
    """The same, and a function from gradients of what is returned to those of ``scaled`` and of the
    floating operands, the latter as tiles."""
    mod = rules.score_mod
    if not mod.is_given:
        return scaled, lambda cotangent: (cotangent, [])
    operands = _loaded(mod, refs.score_mod, part, place)

    def apply(scaled, *floats):
        now = dict(zip(mod.floating, floats, strict=True))
        return _apply(mod, scaled, [now.get(n, x) for n, x in enumerate(operands)], part, place)

    # As tiles, so that what is hidden can be left out of a gradient before it is summed.
    floats = (jnp.broadcast_to(operands[n], scaled.shape) for n in mod.floating)
    out, pull = jax.vjp(apply, scaled, *floats)

    def gradients(cotangent):
        dscaled, *dfloats = pull(cotangent)
        return dscaled, dfloats

    return out, gradients


def _loaded(mod: KernelMod, refs, part: Part, place: Place) -> list:
    return [load(*pair, part, place) for pair in zip(mod.operands, refs, strict=True)]


def _apply(mod: KernelMod, scaled, operands, part: Part, place: Place):
    """A score that is not finite comes from a query or key that is not; it stays as it is, and
    whether the mod hides it does not hang on it."""
    finite = jnp.abs(scaled) < jnp.inf
    indices = place.b, place.h, place.q_indices(part), place.kv_indices(part)
    out = mod(operands, jnp.where(finite, scaled, 0.0), *indices).astype(jnp.float32)
    out = jnp.broadcast_to(out, scaled.shape)
    return jnp.where(finite | (out == -jnp.inf), out, scaled)


def hide(scores, part: Part, place: Place, rules: Rules, refs):
    """``scores [keys, queries]`` of a part with bias added and hidden ones at `HIDDEN`.

    Returns the scores and which keys any query of the part sees: None, all; bool ``[1, keys]``; or
    a range ``(start, stop)``.
    """
    if part.masked:
        scores = _hide_by_mask(scores, part, place, rules, refs)
    if part.band is not None:
        scores = _outside_band(scores, part, part.band, HIDDEN)
    if part.guarded:
        # Counted by a product: its result lies along lanes, as a row of keys must.
        ones = jnp.ones((8, scores.shape[1]), jnp.bfloat16)
        visible = jnp.where(scores == HIDDEN, 0.0, 1.0).astype(jnp.bfloat16)
        return scores, _counted(ones, visible)[:1] > 0
    if part.seen is None:
        return scores, None
    return scores, (part.seen[0] - part.kv_start, part.seen[1] - part.kv_start)


def zero_hidden(dscores, scores, part: Part):
    """The gradient of scores that `hide` returned, 0 where they are hidden, even if it is NaN: a
    value that nobody sees may be, or a cotangent of its query."""
    if part.masked:
        return jnp.where(scores == HIDDEN, 0.0, dscores)
    return dscores if part.band is None else _outside_band(dscores, part, part.band, 0.0)


def _outside_band(tile, part: Part, band: Band, value: float):
    """``tile [keys, queries]`` with ``value`` outside of the band. Only the squares of 128 that
    hold an edge of the band are compared."""
    low, high = band
    start, stop = part.seen or (part.kv_start, part.kv_stop)
    if low is not None and start - 1 - part.q_start < low and not part.lead:
        start = part.kv_start  # the band leaves them out by itself
    lead = part.kv_start + part.lead
    rows = []
    for first in range(part.kv_start, part.kv_stop, LANES):
        last = min(first + LANES, part.kv_stop) - 1
        squares = []
        for q_first in range(part.q_start, part.q_stop, LANES):
            q_last = q_first + LANES - 1
            square = tile[
                first - part.kv_start : last + 1 - part.kv_start,
                q_first - part.q_start : q_last + 1 - part.q_start,
            ]
            if first >= stop or (
                first >= lead
                and ((low is not None and last - q_first < low)
                     or (high is not None and first - q_last > high))
            ):  # fmt: skip
                squares.append(jnp.full(square.shape, value, tile.dtype))
                continue
            key = lax.broadcasted_iota(jnp.int32, square.shape, 0)
            query = lax.broadcasted_iota(jnp.int32, square.shape, 1)
            difference, offset = key - query, first - q_first  # key − query is their sum
            keep = None
            if high is not None and last - q_first > high:
                keep = difference <= high - offset
            if low is not None and first - q_last < low:
                keep = _and(keep, difference >= low - offset)
            if keep is not None and first < lead:
                keep = keep | (key < lead - first)
            if last >= stop:
                keep = _and(keep, key < stop - first)
            if first < start:
                keep = _and(keep, key >= start - first)
            squares.append(square if keep is None else jnp.where(keep, square, value))
        rows.append(squares[0] if len(squares) == 1 else jnp.concatenate(squares, axis=1))
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)


def _hide_by_mask(scores, part: Part, place: Place, rules: Rules, refs):
    visible: Any = None
    if rules.mask.is_given:
        loaded = _loaded(rules.mask, refs.mask, part, place)
        indices = place.q_indices(part), place.kv_indices(part)
        visible = rules.mask(loaded, place.b, place.h, *indices)
    if part.guarded:  # what these see may be NaN where nobody else sees it
        visible = _and(visible, place.q_indices(part) < place.q_len)
    if rules.score_mod.is_given or refs.bias is not None:
        visible = _and(visible, scores != -jnp.inf)
    if refs.bias is not None:
        bias = bias_tile(refs.bias, place.queries(part), place.keys(part))
        visible = _and(visible, bias != -jnp.inf)
        scores = jnp.maximum(scores + bias * LOG2_E, LOWEST)
    return jnp.where(visible, scores, HIDDEN)


def _counted(rows, tile):
    """``rows [n, queries] · tile [keys, queries]ᵀ``, for whole numbers that bfloat16 holds."""
    return lax.dot_general(
        rows,
        tile,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _and(a, b):
    return b if a is None else a & b


def keep_seen(array, seen, keys_axis: int):
    """``array [D, keys]`` or ``[keys, D]`` with keys that are not seen at 0, even if they are NaN.
    seen: as `hide` returns it. ``array`` may hold queries as well, with bool ``[1, queries]``."""
    if seen is None:
        return array
    if isinstance(seen, tuple):
        key = lax.broadcasted_iota(jnp.int32, array.shape, keys_axis)
        seen = (key >= seen[0]) & (key < seen[1])
    elif keys_axis == 0:
        seen = to_column(seen.astype(jnp.float32)) > 0
    return jnp.where(seen, array, jnp.zeros((), array.dtype))
