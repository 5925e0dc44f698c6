"""Attention of new tokens over the cache and themselves, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from smalti.backend import float32_precision

from .ring_buffer import RingBuffer, sees_new, sees_slot


def reference(q, q_sinks, cache: RingBuffer, k, v, lengths, *, scale, softcap):
    """As the public function, of the cache before the new tokens.

    Args:
      q, q_sinks: ``[B, Hq, T, D]``; the latter, or None, is what sink tokens are multiplied with.
      k, v: ``[B, Hkv, T, D]`` and ``[…, Dv]``. lengths: int32 ``[B]``, from 0 to T.

    Returns:
      ``[B, Hq, T, Dv]`` in the dtype of q.
    """
    T, sizes = q.shape[2], {"sinks": cache.sinks, "window": cache.window}
    t = jnp.arange(T, dtype=jnp.int32)[None, :, None]
    length, next_slot, last = (x[:, None, None] for x in (cache.length, cache.next_slot, lengths))
    real = t < last  # [B, T, 1]
    old_seen = real & sees_slot(_slots(cache), t, length, next_slot, **sizes)  # [B, T, rows]
    new_seen = real & sees_new(t.swapaxes(1, 2), t, length, **sizes)  # [B, T, T]
    q, q_sinks = _real(q, real), None if q_sinks is None else _real(q_sinks, real)
    old_k, new_k = _clean(cache.k, old_seen), _clean(k, new_seen)
    old, new = _products_with_slots(q, q_sinks, old_k, cache.sinks), _products(q, new_k)
    if q_sinks is not None:
        is_sink = (length + t.swapaxes(1, 2) < cache.sinks)[:, None]
        new = jnp.where(is_sink, _products(q_sinks, new_k), new)

    scores, seen = jnp.concatenate([old, new], axis=-1), jnp.concatenate([old_seen, new_seen], -1)
    weights, total = _weights(scores, seen, real, scale, softcap)
    rows = cache.k.shape[2]
    out = _weighed(weights[..., :rows], _clean(cache.v, old_seen))
    out = out + _weighed(weights[..., rows:], _clean(v, new_seen))
    return (out / total).astype(q.dtype)


def reference_of_written(q, q_sinks, cache: RingBuffer, lengths, *, scale, softcap):
    """The same of a single new token, T = 1, that the cache has been given already.

    What it took the place of is what its query does not see. So nothing that is read is written
    later, and XLA on a CPU writes in place; it copies the whole cache where reading comes first.
    """
    real = (lengths > 0)[:, None, None]
    length, next_slot = (x[:, None, None] for x in (cache.length, cache.next_slot))
    # To the tokens of the cache, the last of which it is, it is the one before the next.
    seen = sees_slot(_slots(cache), -1, length, next_slot, sinks=cache.sinks, window=cache.window)
    seen = real & seen
    q, q_sinks = _real(q, real), None if q_sinks is None else _real(q_sinks, real)
    scores = _products_with_slots(q, q_sinks, _clean(cache.k, seen), cache.sinks)
    weights, total = _weights(scores, seen, real, scale, softcap)
    return (_weighed(weights, _clean(cache.v, seen)) / total).astype(q.dtype)


def _slots(cache: RingBuffer):
    return jnp.arange(cache.k.shape[2], dtype=jnp.int32)[None, None]


def _real(q, real):
    """``q [B, Hq, T, D]`` with zeros for padding, which may be NaN."""
    return jnp.where(real[:, None], q, jnp.zeros((), q.dtype))


def _clean(x, seen):
    """``x [B, H, n, D]`` without what none of the queries in ``seen [B, T, n]`` sees: it may be
    NaN, which times 0 is NaN."""
    return jnp.where(seen.any(1)[:, None, :, None], x, jnp.zeros((), x.dtype))


def _precision(x):
    return float32_precision() if x.dtype == jnp.float32 else None


def _products(q, k):
    """``[B, Hq, T, n]`` float32. Keys come first: on a CPU the other way transposes them."""
    B, Hq, T, D = q.shape
    s = jnp.einsum(
        "bksd,bkrd->bksr",
        k,
        q.reshape(B, k.shape[1], -1, D),
        precision=_precision(q),
        preferred_element_type=jnp.float32,
    )
    return s.swapaxes(2, 3).reshape(B, Hq, T, -1)


def _products_with_slots(q, q_sinks, k, sinks: int):
    s = _products(q, k)
    if q_sinks is None:
        return s
    return s.at[..., :sinks].set(_products(q_sinks, k[:, :, :sinks]))


def _weights(scores, seen, real, scale, softcap):
    """Softmax's numerators ``[B, Hq, T, n]`` and their sum, 1 where a query is not real."""
    scores, seen = scores * jnp.float32(scale), seen[:, None]
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    top = jnp.where(seen, lax.stop_gradient(scores), -jnp.inf).max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    return weights, jnp.where(real[:, None], weights.sum(-1, keepdims=True), 1.0)


def _weighed(weights, v):
    B, Hq, T, n = weights.shape
    out = jnp.einsum(
        "bkrs,bksd->bkrd",
        weights.astype(v.dtype).reshape(B, v.shape[1], -1, n),
        v,
        precision=_precision(v),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(B, Hq, T, -1)
