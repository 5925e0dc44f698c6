"""`blockwise`: attention in plain JAX that visits only live tiles, in O(S·D) memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from smalti.attention.block_sizes import BlockSizes
from smalti.attention.blockwise import walk as walks
from smalti.attention.blockwise.backward import backward
from smalti.attention.blockwise.forward import forward
from smalti.attention.blockwise.walk import Walk
from smalti.attention.mods import Mods
from smalti.attention.online_softmax import merge
from smalti.backend import float32_precision
from smalti.first_order import first_order
from smalti.masks import BlockMask
from smalti.varying import vary_over, varying_axes


def blockwise(
    q,
    k,
    v,
    *,
    mask,
    score_mod,
    bias,
    sinks,
    scale,
    softcap,
    block_sizes: BlockSizes | None,
):
    """Attention of canonical arguments; see `smalti.attention`.

    Args:
      q: ``[B, Hq, Sq, D]``; k ``[B, Hkv, Sk, D]``; v ``[B, Hkv, Sk, Dv]``.
      mask: a bound mask or a BlockMask. score_mod: a traced mod or None.

    Returns:
      ``out [B, Hq, Sq, Dv]`` in q's dtype, ``lse [B, Hq, Sq]`` float32.
    """
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    walk = walks.plan(
        mask,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        block_sizes=block_sizes,
    )
    if isinstance(mask, BlockMask):
        mask = mask.mask
    floats = [] if score_mod is None else score_mod.floating
    mods = Mods(
        mask, None if score_mod is None else score_mod.without_floating(), None, scale, softcap
    )
    precision = float32_precision() if q.dtype == jnp.float32 else None

    arrays = (q, k, v, bias, floats, mods, walk)
    q, k, v, bias, floats, mods, walk = vary_over(arrays, varying_axes(arrays))
    out, lse = _attend(q, k, v, bias, floats, mods, walk, precision)
    if sinks is not None:  # a key with a score and no value
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], lse.shape)
        empty = (lse == -jnp.inf)[..., None]  # 0 whatever the sink, and so is its derivative
        out, lse = merge(out, lse, jnp.zeros_like(out), sink)
        out = jnp.where(empty, 0, out)
        lse = jnp.where(empty[..., 0], sink, lse)  # the sink's also where it is −inf
    return out.astype(q.dtype), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attend_vjp(q, k, v, bias, floats, mods, walk, precision):
    return _forward(q, k, v, bias, floats, mods, walk, precision)[0]


_attend = jax.jit(_attend_vjp, static_argnums=(7,))


def _forward(q, k, v, bias, floats, mods, walk, precision):
    q_tiles, k_tiles, v_tiles, padded_bias = _pad(q, k, v, bias, walk)
    mods_filled = _fill(mods, padded_bias, floats, walk)
    found = forward(q_tiles, k_tiles, v_tiles, mods_filled, walk, precision)
    out, lse, correction = (_join_heads(x)[:, :, : walk.grid.q_len] for x in found)
    return (out, lse), (q, k, v, bias, floats, mods, walk, out, lse, correction)


def _backward(precision, residuals, cotangents):
    gradients = functools.partial(_gradients, precision)
    name = "smalti.attention: implementation 'blockwise'"
    return first_order(gradients, name, instead="reference")(residuals, cotangents)


def _gradients(precision, residuals, cotangents):
    q, k, v, bias, floats, mods, walk, out, lse, correction = residuals
    dout, dlse = cotangents
    # What weights are multiplied by is corrected instead of them, and rounded first: with the same
    # dout in delta and in the products, the gradients of a row's scores add up to 0 as they should.
    dout = (dout.astype(jnp.float32) * correction[..., None]).astype(q.dtype)
    delta = (out * dout.astype(jnp.float32)).sum(-1) - dlse * correction

    q_tiles, k_tiles, v_tiles, padded_bias = _pad(q, k, v, bias, walk)
    dout, lse, delta = (_pad_queries(x, k.shape[1], walk) for x in (dout, lse, delta))
    mods = _fill(mods, padded_bias, floats, walk)
    dq, totals = backward(q_tiles, k_tiles, v_tiles, dout, lse, delta, mods, walk, precision)

    dq = _join_heads(dq)[:, :, : q.shape[2]].astype(q.dtype)
    dk, dv = totals.dk[:, :, : k.shape[2]], totals.dv[:, :, : v.shape[2]]
    dbias = None
    if bias is not None:
        dbias = totals.dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    dfloats = [g.astype(x.dtype) for g, x in zip(totals.dcaptured, floats, strict=True)]
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), dbias, dfloats, None, None


_attend_vjp.defvjp(_forward, _backward)


def _fill(mods: Mods, bias, floats, walk: Walk) -> Mods:
    """The mods with their differentiable arrays back in place, and arrays padded to tiles."""
    score_mod = None if mods.score_mod is None else mods.score_mod.with_floating(floats)
    grid = walk.grid
    mask = mods.mask.pad_to(grid.num_q * grid.block_q, grid.num_kv * grid.block_kv)
    return dataclasses.replace(mods, mask=mask, bias=bias, score_mod=score_mod)


def _pad(q, k, v, bias, walk: Walk):
    grid = walk.grid
    more_q, more_kv = -grid.q_len % grid.block_q, -grid.kv_len % grid.block_kv
    k, v = (_pad_axis(x, 2, more_kv) for x in (k, v))
    if bias is not None:
        bias = _pad_axis(bias, 2, more_q if bias.shape[2] > 1 else 0)
        bias = _pad_axis(bias, 3, more_kv if bias.shape[3] > 1 else 0)
    return _pad_queries(q, k.shape[1], walk), k, v, bias


def _pad_queries(x, kv_heads: int, walk: Walk):
    """``[B, Hq, Sq, …]`` as ``[B, Hkv, G, Sq padded, …]``."""
    x = _pad_axis(x, 2, -walk.grid.q_len % walk.grid.block_q)
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _join_heads(x):
    """``[B, Hkv, G, …]`` as ``[B, Hq, …]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _pad_axis(x, axis: int, more: int):
    return x if more == 0 else jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])
