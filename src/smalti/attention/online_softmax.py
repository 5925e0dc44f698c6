"""Softmax over keys that arrive in pieces.

The state of a row after some keys is ``(m, l, acc)``: the largest score, the sum of
``exp(score − m)`` and the sum of ``exp(score − m) · value``. A row that has seen no key is
``(−inf, 0, 0)``. Finished, it is ``(out, lse)``: the weighted mean of the values and the natural
logarithm of the weights' sum. See FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    m: Any  # float32 [..., rows]
    l: Any  # float32 [..., rows]  # noqa: E741
    acc: Any  # float32 [..., rows, Dv]


def update(state: State, scores, weigh_values) -> State:
    """Add keys: ``scores [..., rows, keys]`` float32, −inf where hidden;
    ``weigh_values(weights) → [..., rows, Dv]`` multiplies by their values.
    """
    m = jnp.maximum(state.m, scores.max(-1))
    shift = _finite(m)  # a row without a key so far: exp(−inf − 0) = 0, not exp(−inf + inf)
    weights = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(state.m - shift)
    return State(
        m,
        state.l * decay + weights.sum(-1),
        state.acc * decay[..., None] + weigh_values(weights),
    )


def finish(state: State):
    """``(out, lse, correction)`` of the rows; 0, −inf and 1 where no key was seen.

    correction: what ``exp(score − lse)`` is to be multiplied by to be a weight, as lse is rounded:
    of scores of −1e9, log l is lost in it.
    """
    empty = state.m == -jnp.inf
    m, l = _finite(state.m), jnp.where(empty, 1, state.l)  # noqa: E741
    lse = m + jnp.log(l)
    out = state.acc / l[..., None]
    return out, jnp.where(empty, -jnp.inf, lse), jnp.exp((lse - m) - jnp.log(l))


def merge(out_a, lse_a, out_b, lse_b):
    """Attention over the union of two disjoint sets of keys from the results over each.

    ``out [..., Dv]``, ``lse [...]`` float32. Differentiable; either side may be empty.
    """
    top = jax.lax.stop_gradient(_finite(jnp.maximum(lse_a, lse_b)))
    # exp(−inf) = 0 has derivative 0 · anything: keep −inf out of the differentiated path.
    weight_a, weight_b = _weight(lse_a, top), _weight(lse_b, top)
    total = weight_a + weight_b
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    out = (weight_a / safe)[..., None] * out_a + (weight_b / safe)[..., None] * out_b
    return out, jnp.where(empty, -jnp.inf, top + jnp.log(safe))


def _weight(lse, top):
    seen = lse != -jnp.inf
    return jnp.where(seen, jnp.exp(jnp.where(seen, lse, top) - top), 0)


def _finite(m):
    return jnp.where(m == -jnp.inf, 0, m)
