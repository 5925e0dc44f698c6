"""The kernels under reverse-mode differentiation, for arguments as the public function has them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from smalti.attention.block_sizes import BlockSizes
from smalti.attention.tpu import block_sizes as choice_of_blocks
from smalti.attention.tpu import mods, operands, smem, tiles
from smalti.attention.tpu.backward import backward
from smalti.attention.tpu.bias_gradient import bias_gradient
from smalti.attention.tpu.forward import forward
from smalti.attention.tpu.layout import Heads
from smalti.attention.tpu.plan import plans_of
from smalti.attention.tpu.scores import LN_2, Rules
from smalti.backend import kernel_precision, target_chip
from smalti.first_order import first_order
from smalti.masks import BlockMask
from smalti.tpu.lanes import LANES
from smalti.varying import vary_over, varying_axes


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced."""

    rules: Rules
    heads: Heads
    vmem_limit: int
    interpret: Any


def refusal(call) -> str | None:
    """What of a call (`validation.Canonical`) these kernels cannot do, or None."""
    for name, array in (("q, k and v", call.q), ("bias", call.bias)):
        if array is not None and array.dtype == jnp.float16:
            return (
                f"float16 ({name}): Mosaic, the compiler of TPU kernels, refuses it; use bfloat16, "
                "or implementation='blockwise'."
            )
    mask = call.mask.mask if isinstance(call.mask, BlockMask) else call.mask
    sizes = (*call.q.shape[:3], call.k.shape[2])
    given = {"mask": mods.traced_mask(mask)}
    given |= {} if call.score_mod is None else {"score_mod": call.score_mod}
    try:
        taken = {name: smem.bytes_of_numbers(mod, sizes, name) for name, mod in given.items()}
    except NotImplementedError as error:
        return str(error)
    return smem.refusal(taken)


def pallas(
    q, k, v, *, mask, score_mod, bias, sinks, scale, softcap, layout,
    block_sizes: BlockSizes | None, interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attention of canonical arguments; see `smalti.attention`.

    Args:
      q: ``[B, Hq, Sq, D]``; k ``[B, Hkv, Sk, D]``; v ``[B, Hkv, Sk, Dv]``.
      mask: bound to these sizes, or a BlockMask. score_mod: a traced mod or None.
      layout: of the caller's arrays. "BSHD" is kept where heads are whole registers of lanes; the
        caller's transpose and the one here then cancel.

    Returns:
      ``out [B, Hq, Sq, Dv]`` in q's dtype, ``lse [B, Hq, Sq]`` float32.
    """
    batch, num_heads, q_len, D = q.shape
    kv_heads, kv_len, Dv = v.shape[1:]
    sizes = batch, num_heads, q_len, kv_len
    whole_lanes = D % LANES == 0 and Dv % LANES == 0
    heads = Heads(batch, num_heads, kv_heads, D, Dv, layout if whole_lanes else "BHDS")
    score, score_operands = mods.NO_MOD, ()
    if score_mod is not None:
        score, score_operands = mods.split(score_mod, sizes, "score_mod")
    mask_mod, mask_operands, walks = plans_of(
        mask,
        sizes,
        heads=heads,
        itemsize=q.dtype.itemsize,
        chip=target_chip(),
        block_sizes=block_sizes,
        score_mod=score,
        bias=None if bias is None else (bias.shape[2:], bias.dtype.itemsize),
    )
    static = Static(
        rules=Rules(
            scale=scale,
            softcap=softcap,
            mask=mask_mod,
            score_mod=score,
            precision=kernel_precision(q.dtype),
        ),
        heads=heads,
        vmem_limit=choice_of_blocks.vmem_limit(target_chip()),
        interpret=interpret,
    )
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    arrays = (q, k, v, bias, sinks, mask_operands, score_operands, walks)
    out, lse = cast(Any, _attend)(static, *vary_over(arrays, varying_axes(arrays)))
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q, k, v, bias, sinks, mask, score_mod, walks):
    return _forward(static, q, k, v, bias, sinks, mask, score_mod, walks)[0]


def _first_order(function, static: Static):
    name = "smalti.attention: implementation 'pallas'"
    return first_order(functools.partial(function, static), name, instead="reference")


def _forward_rule(static: Static, *arrays):
    return _first_order(_forward, static)(*arrays)


def _backward_rule(static: Static, residuals, cotangents):
    return _first_order(_backward, static)(residuals, cotangents)


_attend.defvjp(_forward_rule, _backward_rule)


def _forward(static: Static, q, k, v, bias, sinks, mask, score_mod, walks):
    walk, heads = walks[0], static.heads
    out, lse, correction = forward(
        _lay_out(q, walk.q_padded, heads),
        _lay_out(k, walk.kv_padded, heads),
        _lay_out(v, walk.kv_padded, heads),
        sinks,
        _padded_bias(walk, bias),
        _padded_mods(static.rules, walk, mask, score_mod),
        walk,
        static.rules,
        heads,
        vmem_limit=static.vmem_limit,
        interpret=static.interpret,
    )
    out = _by_head(out, heads.Hq, heads)[:, :, : walk.q_len]
    lse_base2 = lse[:, :, 0, : walk.q_len]
    if correction is not None:
        correction = correction[:, :, 0, : walk.q_len]
    residuals = q, k, v, bias, sinks, mask, score_mod, walks, out, lse_base2, correction
    lse = lse_base2 * LN_2
    if sinks is not None and walk.empty_rows:  # a row that sees no key still has its sink
        lse = jnp.where(lse == -jnp.inf, sinks[None, :, None], lse)
    return (out, lse), residuals


def _backward(static: Static, residuals, cotangents):
    q, k, v, bias, sinks, mask, score_mod, walks, out, lse_base2, correction = residuals
    dout, dlse = cotangents
    walk, heads = walks[1], static.heads
    if correction is not None:  # of weights: whatever they are multiplied by
        dout = (dout.astype(jnp.float32) * correction[..., None]).astype(dout.dtype)
    delta = _rowsum(out, dout, heads) - (dlse if correction is None else dlse * correction)
    empty = lse_base2 == -jnp.inf
    lse_base2 = jnp.where(empty, jnp.inf, lse_base2)  # weights of 0
    if walk.empty_rows:  # they pass nothing on, whatever their q and dout hold
        delta = jnp.where(empty, 0, delta)
    if walk.empty_in_bands:  # else the kernels see to it, which costs less than to write both anew
        q, dout = (jnp.where(empty[..., None], 0, x) for x in (q, dout))
    dsinks = None
    if sinks is not None:
        # The sink's weight; its value is 0, so that its dP is 0. It is the lse of an empty row.
        dsinks = -jnp.exp(sinks[None, :, None] - lse_base2 * LN_2) * delta
        dsinks = jnp.where(empty, dlse, dsinks).sum((0, 2))
    # As the kernel wrote it, not by way of the natural logarithm, which would round once more.
    padded_lse = _pad(lse_base2, 2, walk.q_padded, jnp.inf)
    arguments = (
        _lay_out(q, walk.q_padded, heads),
        _lay_out(k, walk.kv_padded, heads),
        _lay_out(v, walk.kv_padded, heads),
        _lay_out(dout, walk.q_padded, heads),
        padded_lse[:, :, None],
        _pad(delta, 2, walk.q_padded)[:, :, None],
        _padded_bias(walk, bias),
        _padded_mods(static.rules, walk, mask, score_mod),
        walk,
        static.rules,
        heads,
    )
    options = {"vmem_limit": static.vmem_limit, "interpret": static.interpret}
    *gradients, dscore_mod = backward(*arguments, **options)
    shapes = (q, heads.Hq), (k, heads.Hkv), (v, heads.Hkv)
    dq, dk, dv = (
        _by_head(x, number, heads)[:, :, : like.shape[2]]
        for x, (like, number) in zip(gradients, shapes, strict=True)
    )
    dbias = None
    if bias is not None:
        dbias = bias_gradient(*arguments, **options)
        dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    dscore_mod = tuple(
        operands.summed(static.rules.score_mod.operands[n], dscore_mod[n], x, walk)
        if n in dscore_mod
        else None
        for n, x in enumerate(score_mod)
    )
    return dq, dk, dv, dbias, dsinks, None, dscore_mod, None


def _padded_mods(rules: Rules, walk: tiles.Walk, mask, score_mod) -> tuple[tuple, tuple]:
    score = operands.padded(rules.score_mod, score_mod, walk)
    return operands.padded(rules.mask, mask, walk), score


def _padded_bias(walk: tiles.Walk, bias):
    if bias is None:
        return None
    for axis, length in ((2, walk.q_padded), (3, walk.kv_padded)):
        bias = bias if bias.shape[axis] == 1 else _pad(bias, axis, length)
    return bias


def _lay_out(x, length: int, heads: Heads):
    """``[B, H, S, D]``, padded, as the kernels take it."""
    x = _pad(x, 2, length)
    if heads.layout == "BSHD":
        return x.swapaxes(1, 2).reshape(x.shape[0], length, -1)
    return x.swapaxes(2, 3) if heads.layout == "BHDS" else x


def _by_head(x, number: int, heads: Heads):
    """The inverse of `_lay_out`, padding apart."""
    if heads.layout == "BSHD":
        return x.reshape(*x.shape[:2], number, -1).swapaxes(1, 2)
    return x.swapaxes(2, 3) if heads.layout == "BHDS" else x


def _pad(x, axis: int, length: int, value: float = 0.0):
    more = length - x.shape[axis]
    if more == 0:
        return x
    return jnp.pad(x, [(0, more if n == axis else 0) for n in range(x.ndim)], constant_values=value)


def _rowsum(out, dout, heads: Heads):
    """``rowsum(dO ∘ O)`` of ``[B, Hq, S, Dv]`` over the last axis, float32."""

    def product(a, b):
        return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)

    if heads.layout != "BSHD":
        return product(out, dout)
    # Side by side, each head's lanes by themselves: else XLA writes the factors' products to HBM,
    # and a copy of them in another layout.
    out, dout = (_lay_out(x, x.shape[2], heads) for x in (out, dout))
    lanes = (slice(h * heads.Dv, (h + 1) * heads.Dv) for h in range(heads.Hq))
    return jnp.stack([product(out[..., of], dout[..., of]) for of in lanes], 1)
