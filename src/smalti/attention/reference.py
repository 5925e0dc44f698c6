"""Attention as its formula says, in plain JAX without tiles: the meaning that kernels must have.

It stores the whole ``[B, Hq, Sq, Sk]`` score matrix. Every clause of the contract holds under
ordinary autodiff, forward mode and second derivatives too: what must not reach a gradient is taken
out by ``where`` *before* it is used, because ``0 · NaN`` is NaN (the "double where").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from smalti.backend import float32_precision
from smalti.masks.mask_mod import Mask
from smalti.masks.traced_mod import TracedMod


def reference(q, k, v, *, mask: Mask, score_mod: TracedMod | None, bias, sinks, scale, softcap):
    """Attention of canonical arguments; see `smalti.attention`.

    Args:
      q: ``[B, Hq, Sq, D]``; k ``[B, Hkv, Sk, D]``; v ``[B, Hkv, Sk, Dv]``.
      mask: a mask bound to these sizes. score_mod: a traced mod or None.
      bias: broadcasts to ``[B, Hq, Sq, Sk]`` with four dimensions, or None.
      sinks: ``[Hq]`` or None. scale: float. softcap: float or None.

    Returns:
      ``out [B, Hq, Sq, Dv]`` in q's dtype, ``lse [B, Hq, Sq]`` float32.
    """
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    shape = (batch, heads, q_len, kv_len)
    by_group = (batch, kv_heads, heads // kv_heads, q_len, kv_len)
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(batch, kv_heads, heads // kv_heads, q_len, -1)
    b, h, q_idx, kv_idx = (jnp.arange(n, dtype=jnp.int32) for n in shape)

    visible = mask(*jnp.ix_(b, h, q_idx, kv_idx))
    visible = jnp.broadcast_to(visible, shape)
    if bias is not None:
        bias = bias.astype(jnp.float32)
        visible = visible & (bias != -jnp.inf)
    if score_mod is not None:
        # A first look, at values alone, for the keys that score_mod hides. A score that is not
        # finite comes from a poisoned query or key; whether score_mod hides it must not hang on it.
        first = lax.stop_gradient(_products(q, k)).reshape(shape) * scale
        first = jnp.where(jnp.isfinite(first), first, 0)
        first = lax.stop_gradient(score_mod.over_scores(first, b, h, q_idx, kv_idx))
        visible = visible & (first != -jnp.inf)

    # Queries that see nothing and keys that nobody sees reach neither a product nor a gradient.
    grouped = visible.reshape(by_group)
    q = jnp.where(grouped.any(-1)[..., None], q, 0)
    seen = grouped.any((2, 3))[..., None]
    k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)

    scores = _products(q, k).reshape(shape) * scale
    if score_mod is not None:
        scores = _modified(score_mod, scores, visible, (b, h, q_idx, kv_idx))
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias

    empty = ~visible.any(-1)
    top = jnp.where(visible, lax.stop_gradient(scores), -jnp.inf).max(-1)
    sink = None
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], empty.shape)
        top = jnp.maximum(top, lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, 0, top)  # a constant to the softmax, whatever it is
    weights = jnp.exp(jnp.where(visible, scores - top[..., None], 0))
    weights = jnp.where(visible, weights, 0)
    total = weights.sum(-1) + (0 if sink is None else jnp.exp(sink - top))
    total = jnp.where(empty, 1, total)
    out = jnp.einsum(
        "bkgqs,bksd->bkgqd", weights.reshape(by_group), v, precision=float32_precision()
    )
    out = out.reshape(batch, heads, q_len, -1) / total[..., None]
    out = jnp.where(empty[..., None], 0, out)
    lse = jnp.where(empty, -jnp.inf if sink is None else sink, top + jnp.log(total))
    return out.astype(dtype), lse


def _products(q, k):
    return jnp.einsum("bkgqd,bksd->bkgqs", q, k, precision=float32_precision())


def _modified(score_mod: TracedMod, scores, visible, indices):
    """``score_mod`` where visible. At hidden positions it may be anything, and 0 times its
    derivative NaN: there it is evaluated at one of the visible positions instead."""
    b, h, q_idx, kv_idx = indices
    axes = (scores, *jnp.ix_(b, h, q_idx, kv_idx))
    pick = jnp.argmax(visible)
    flat = [jnp.broadcast_to(x, visible.shape).reshape(-1) for x in axes]
    flat = [jnp.where(visible.reshape(-1), x, lax.stop_gradient(x[pick])) for x in flat]
    # If nothing at all is visible, the place picked is hidden too.
    some = visible.any()
    floats = [jnp.where(some, x, lax.stop_gradient(x)) for x in score_mod.floating]
    mod = score_mod.with_floating(floats)
    return jax.vmap(mod.call)(*flat).astype(jnp.float32).reshape(visible.shape)
