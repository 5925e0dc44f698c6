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
    B, Hq, T, D = q.shape
    Hkv, sizes = k.shape[1], {"sinks": cache.sinks, "window": cache.window}
    precision = float32_precision() if q.dtype == jnp.float32 else None

    t = jnp.arange(T, dtype=jnp.int32)[None, :, None]
    rows = cache.k.shape[2]
    slot = jnp.arange(rows, dtype=jnp.int32)[None, None]
    length, next_slot, last = (x[:, None, None] for x in (cache.length, cache.next_slot, lengths))
    real = t < last  # [B, T, 1]
    old_seen = real & sees_slot(slot, t, length, next_slot, **sizes)  # [B, T, rows]
    new_seen = real & sees_new(t.swapaxes(1, 2), t, length, **sizes)  # [B, T, T]

    # What nobody sees may be NaN, which times 0 is NaN.
    def clean(x, seen):
        return jnp.where(seen.any(1)[:, None, :, None], x, jnp.zeros((), x.dtype))

    def products(q, k):
        q = jnp.where(real[:, None], q, jnp.zeros((), q.dtype)).reshape(B, Hkv, Hq // Hkv, T, D)
        s = jnp.einsum(
            "bkgtd,bksd->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32
        )
        return s.reshape(B, Hq, T, -1)

    old_k, new_k = clean(cache.k, old_seen), clean(k, new_seen)
    old, new = products(q, old_k), products(q, new_k)
    if q_sinks is not None:
        old = old.at[..., : cache.sinks].set(products(q_sinks, old_k[:, :, : cache.sinks]))
        is_sink = (length + t.swapaxes(1, 2) < cache.sinks)[:, None]
        new = jnp.where(is_sink, products(q_sinks, new_k), new)

    scores = jnp.concatenate([old, new], axis=-1) * jnp.float32(scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = jnp.concatenate([old_seen, new_seen], axis=-1)[:, None]
    top = jnp.where(seen, lax.stop_gradient(scores), -jnp.inf).max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.where(real[:, None], weights.sum(-1, keepdims=True), 1.0)

    def weighed(weights, v):
        weights = weights.astype(v.dtype).reshape(B, Hkv, Hq // Hkv, T, -1)
        out = jnp.einsum(
            "bkgts,bksd->bkgtd",
            weights,
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return out.reshape(B, Hq, T, -1)

    out = weighed(weights[..., :rows], clean(cache.v, old_seen))
    out = out + weighed(weights[..., rows:], clean(v, new_seen))
    return (out / total).astype(q.dtype)
