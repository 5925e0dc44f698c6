"""`jax.nn.dot_product_attention` by its own conventions, on our kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from smalti.attention.api import attention
from smalti.attention.validation import suggest
from smalti.masks import causal, full, lengths, local
from smalti.masks.mask_mod import ArrayMask

IMPLEMENTATIONS = ("xla", "reference", "blockwise", "pallas", "cudnn")


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    """A drop-in for `jax.nn.dot_product_attention`: same arguments, same meaning.

    Unlike `smalti.attention` it aligns causal masks and windows at the first query and key
    (top-left), whatever the two lengths. The one difference to JAX: a row without a visible key is
    0 (JAX: the mean of the values), its residual −inf.

    Args:
      query: ``[B, T, N, H]`` or ``[T, N, H]``; float32, bfloat16 or float16.
      key, value: ``[B, S, K, H]`` or ``[S, K, H]``; N is a multiple of K.
      bias: added to the scaled scores; broadcasts to ``[B, N, T, S]``.
      mask: boolean, True where the query may see the key; broadcasts to ``[B, N, T, S]``.
      scale: ``1/sqrt(H)`` by default; a number, or an array scalar, which has a gradient.
      is_causal: key ``j`` is visible to query ``i`` if ``j ≤ i``.
      query_seq_lengths, key_value_seq_lengths: int32 ``[B]``.
      local_window_size: ``(left, right)``, or one int for both: ``i − left ≤ j ≤ i + right``.
      implementation: None, "xla" (both: our plain-JAX path), or one of `smalti.attention`'s.
        "cudnn" raises NotImplementedError.
      return_residual: also return the logsumexp ``[B, T, N]`` or ``[T, N]`` in key's dtype, through
        which, as in JAX, no gradient flows.

    Returns:
      The output in query's shape and dtype; with ``return_residual`` the pair (output, residual).

    Raises:
      ValueError: an argument does not fit; the message says which.
      NotImplementedError: for ``implementation="cudnn"``.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    shape = query.shape
    q, k, v = (
        _ensure_4d(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    batch = q.shape[0]
    if q.dtype != k.dtype or k.shape[0] != batch or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"key: got {key.dtype}{list(key.shape)} for a query {query.dtype}{list(query.shape)}; "
            "they must share dtype, batch size and head size."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"query: its heads ({q.shape[2]}) must be a multiple of the key heads ({k.shape[2]})."
        )
    if k.shape != v.shape:
        raise ValueError(
            f"value: got shape {list(value.shape)}; it must be key's, {list(key.shape)}. For "
            "values of another head size use smalti.attention."
        )
    visible = full()
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != bool:
            raise ValueError(f"mask: got dtype {mask.dtype}; it must be boolean.")
        visible = visible & ArrayMask(_ensure_4d(mask, "mask"))
    if is_causal:
        visible = visible & causal(offset=0)
    if local_window_size is not None:
        visible = visible & local(*_window(local_window_size))
    if query_seq_lengths is not None:
        visible = visible & lengths(q=_lengths(query_seq_lengths, batch, "query_seq_lengths"))
    if key_value_seq_lengths is not None:
        visible = visible & lengths(
            kv=_lengths(key_value_seq_lengths, batch, "key_value_seq_lengths")
        )
    score_mod = None
    if isinstance(scale, (jax.Array, np.ndarray)):
        factor = jnp.asarray(scale, jnp.float32).reshape(())
        scale, score_mod = 1.0, lambda score, b, h, q_idx, kv_idx: score * factor
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if jnp.issubdtype(bias.dtype, jnp.floating) else bias.astype(jnp.float32)
    out, lse = attention(
        q,
        k,
        v,
        mask=visible,
        score_mod=score_mod,
        bias=bias,
        scale=scale,
        return_lse=True,
        implementation=_implementation(implementation),
    )
    out = out.reshape(shape)
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(key.dtype))
    return out, residual.reshape(shape[:-1])


def _implementation(implementation: str | None) -> str | None:
    if implementation is None:
        return None
    suggest("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "cudnn":
        raise NotImplementedError(
            "implementation='cudnn': smalti has no cuDNN path. Leave it out, or call "
            "jax.nn.dot_product_attention."
        )
    return "blockwise" if implementation == "xla" else implementation


def _ensure_4d(x, name: str):
    if x.ndim > 4:
        raise ValueError(f"{name}: got shape {list(x.shape)}; at most four dimensions.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _window(size) -> tuple[int, int]:
    left, right = (size, size) if isinstance(size, int) else size
    return int(left), int(right)


def _lengths(values, batch: int, name: str):
    values = jnp.asarray(values)
    if values.shape != (batch,) or values.dtype != jnp.int32:
        raise ValueError(
            f"{name}: got {values.dtype}{list(values.shape)}; it must be int32 of shape [{batch}]."
        )
    return values
