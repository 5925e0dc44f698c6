"""What attention and its gradients should be: NumPy in float64, with the derivative written out.

Independent of every implementation, `reference` included, which gets its gradients from autodiff.
Slow, and it stores ``[B, Hq, Sq, Sk]``: it is for tests and the lab.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from smalti.masks import BlockMask, document, full
from smalti.masks.mask_mod import as_mask


class Result(NamedTuple):
    """Results and gradients in the caller's layout; what was not asked for is None."""

    out: Any  # like q, with Dv
    lse: Any  # [B, Hq, Sq]
    dq: Any
    dk: Any
    dv: Any
    dbias: Any  # in bias's own shape
    dsinks: Any  # [Hq]
    dcaptured: tuple  # one for each of `captured`; None for integers
    visible: np.ndarray  # bool [B, Hq, Sq, Sk], what mask, bias and score_mod leave
    weights: np.ndarray  # [B, Hq, Sq, Sk], the softmax, 0 where hidden
    dscores: Any  # [B, Hq, Sq, Sk], gradient of the final score
    slope: Any  # [B, Hq, Sq, Sk], derivative of the final score by q·k


def oracle(
    q,
    k,
    v,
    *,
    mask=None,
    score_mod=None,
    captured=(),
    bias=None,
    segment_ids=None,
    softcap=None,
    scale=None,
    sinks=None,
    layout="BSHD",
    dout=None,
    dlse=None,
    compute_dtype=np.float64,
    storage_dtype=None,
) -> Result:
    """Attention by its definition. The arguments of `smalti.attention` (unchecked), and

    Args:
      captured: arrays that ``score_mod`` takes after its five arguments, so that their gradients
        can be computed in full precision.
      dout, dlse: cotangents of the result and of lse; with either, gradients are computed.
      compute_dtype: np.float64, or np.float32 for what a plain computation without care gives.
      storage_dtype: what that plain computation stores weights, score gradients and results in.
    """
    with np.errstate(all="ignore"):
        return _oracle(**locals())


def _oracle(
    *, q, k, v, mask, score_mod, captured, bias, segment_ids, softcap, scale, sinks, layout, dout,
    dlse, compute_dtype, storage_dtype,
) -> Result:  # fmt: skip
    def number(x):
        return np.asarray(x).astype(compute_dtype)

    def stored(x):
        return x if storage_dtype is None else x.astype(storage_dtype).astype(compute_dtype)

    def heads_first(x):  # and back
        return x if layout == "BHSD" else x.swapaxes(1, 2)

    q, k, v = (heads_first(number(x)) for x in (q, k, v))
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    shape = (batch, heads, q_len, kv_len)
    scale = compute_dtype(1 / np.sqrt(dim) if scale is None else scale)

    visible = _visible(mask, segment_ids, shape)
    bias_shape = np.shape(bias)
    if bias is not None:
        bias = number(bias)
        visible = visible & ~np.isneginf(bias)
    if score_mod is not None:
        captured = tuple(
            number(x) if jax.numpy.issubdtype(x.dtype, np.floating) else np.asarray(x)
            for x in captured
        )
        products = q @ np.repeat(k, group, 1).swapaxes(2, 3) * scale
        mod = _ScoreMod(score_mod, captured, visible)
        raw = mod.values(np.where(np.isfinite(products), products, 0))
        visible = visible & ~np.isneginf(raw)
        mod = _ScoreMod(score_mod, captured, visible)

    # What is hidden altogether is not there, whatever it holds.
    empty = np.asarray(~visible.any(-1))
    seen = np.asarray(visible).reshape(batch, kv_heads, group, q_len, kv_len).any((2, 3))
    q = np.where(empty[..., None], 0, q)
    k, v = (np.repeat(np.where(np.expand_dims(seen, -1), x, 0), group, 1) for x in (k, v))

    products = q @ k.swapaxes(2, 3) * scale
    scores = products if score_mod is None else mod.values(products)
    slope, tanh = np.full(shape, scale), np.zeros(())
    if softcap is not None:
        tanh = np.tanh(scores / compute_dtype(softcap))
        scores = compute_dtype(softcap) * tanh
        slope = slope * (1 - tanh * tanh)
    if bias is not None:
        scores = scores + bias
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1)
    if sinks is not None:
        sinks = number(sinks)[:, None]
        top = np.maximum(top, sinks)
    top = np.where(np.isneginf(top), 0, top)
    exps = np.where(visible, np.exp(scores - top[..., None]), 0)
    total = exps.sum(-1) + (0 if sinks is None else np.exp(sinks - top))
    lse = top + np.log(total)  # log(0) = −inf where nothing is seen and there is no sink
    weights = exps / np.where(total == 0, 1, total)[..., None]
    out = stored(stored(weights) @ v)
    if dout is None and dlse is None:
        return Result(
            heads_first(out), lse, None, None, None, None, None, (), visible, weights, None, slope
        )

    dout = np.zeros_like(out) if dout is None else heads_first(number(dout))
    dlse = np.zeros_like(lse) if dlse is None else number(dlse)
    dlse_of_sink = dlse
    dout, dlse = np.where(empty[..., None], 0, dout), np.where(empty, 0, dlse)
    dweights = dout @ v.swapaxes(2, 3)
    through_out = (dout * out).sum(-1)
    dscores = weights * (dweights - through_out[..., None] + dlse[..., None])
    dscores = stored(np.where(visible, dscores, 0))
    dbias = None if bias is None else _sum_to(dscores, bias_shape)
    dsinks = None
    if sinks is not None:
        dsinks = (np.exp(sinks - lse) * (dlse_of_sink - through_out)).sum((0, 2))
    dcaptured = ()
    inner = dscores * (1 - tanh * tanh)
    if score_mod is not None:
        slope_of_mod, dcaptured = mod.gradients(products, inner)
        slope = slope * slope_of_mod
    dproducts = stored(np.where(visible, dscores * slope, 0))

    def per_kv_head(x):
        return x.reshape(batch, kv_heads, group, *x.shape[2:]).sum(2)

    return Result(
        heads_first(out),
        lse,
        heads_first(stored(dproducts @ k)),
        heads_first(stored(per_kv_head(dproducts.swapaxes(2, 3) @ q))),
        heads_first(stored(per_kv_head(stored(weights).swapaxes(2, 3) @ dout))),
        dbias,
        dsinks,
        dcaptured,
        visible,
        weights,
        dscores,
        slope,
    )


def _visible(mask, segment_ids, shape) -> np.ndarray:
    if isinstance(mask, BlockMask):
        mask = mask.mask
    mask = full() if mask is None else as_mask(mask)
    if segment_ids is not None:
        mask = mask & document(segment_ids)
    indices = np.ix_(*(np.arange(n, dtype=np.int32) for n in shape))
    return np.broadcast_to(np.asarray(mask.bind(*shape)(*indices)), shape)


def _sum_to(x, shape):
    """The transpose of broadcasting ``shape`` to ``x.shape``."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, n in enumerate(padded) if n == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


class _ScoreMod:
    """A ``score_mod`` at the visible positions, the only ones where it is ever evaluated."""

    def __init__(self, function, captured, visible):
        self.captured = captured
        self.visible = visible
        self.count = int(visible.sum())
        # Rounded up, so that few lengths are compiled; what is added repeats the first position.
        self.padding = (1 << max(self.count - 1, 0).bit_length()) - self.count
        self.indices = [self._pick(x) for x in np.indices(visible.shape, dtype=np.int32)]
        self.floats = [i for i, x in enumerate(captured) if np.issubdtype(x.dtype, np.floating)]
        # One program each: op by op every step would be compiled by itself.
        self.mapped = jax.jit(jax.vmap(function, in_axes=(0,) * 5 + (None,) * len(captured)))

    def _pick(self, x):
        return np.pad(x[self.visible], (0, self.padding), mode="edge" if self.count else "constant")

    def _place(self, flat):
        placed = np.zeros(self.visible.shape, flat.dtype)
        placed[self.visible] = flat[: self.count]
        return placed

    def values(self, scores):
        if not self.count:
            return np.zeros_like(scores)
        with jax.enable_x64(scores.dtype == np.float64):
            captured = [jax.numpy.asarray(x) for x in self.captured]
            flat = self.mapped(self._pick(scores), *self.indices, *captured)
        return self._place(np.asarray(flat).astype(scores.dtype))

    def gradients(self, scores, cotangent):
        """The derivative by the score, elementwise, and the gradients of the captured arrays."""
        nothing = tuple(
            np.zeros_like(x) if i in self.floats else None for i, x in enumerate(self.captured)
        )
        if not self.count:
            return np.zeros_like(scores), nothing

        def function(score, floats):
            captured = [jax.numpy.asarray(x) for x in self.captured]
            for i, x in zip(self.floats, floats, strict=True):
                captured[i] = x
            return self.mapped(score, *self.indices, *captured).astype(scores.dtype)

        @jax.jit
        def both(score, floats, cotangent):
            _, pull = jax.vjp(function, score, floats)
            return pull(jax.numpy.ones_like(score))[0], pull(cotangent)[1]

        with jax.enable_x64(scores.dtype == np.float64):
            floats = [jax.numpy.asarray(self.captured[i]) for i in self.floats]
            score = jax.numpy.asarray(self._pick(scores))
            picked = self._pick(cotangent)
            picked[self.count :] = 0
            slope, grads = both(score, floats, jax.numpy.asarray(picked))
        found = dict(zip(self.floats, map(np.asarray, grads), strict=True))
        return self._place(np.asarray(slope)), tuple(found.get(i) for i in range(len(nothing)))
