"""What `attend` and `append` accept; messages say what they got, what they take, and advice."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from smalti.attention.validation import DTYPES, LAYOUTS, suggest
from smalti.masks.arguments import saturated
from smalti.preprocess.rope import Rope
from smalti.preprocess.validation import check_constant, check_rotary
from smalti.tpu.launch import check_interpret

from .ring_buffer import RingBuffer

IMPLEMENTATIONS = ("reference", "pallas")
POSITIONS = ("cache", "absolute")
KERNEL_DTYPES = (jnp.float32, jnp.bfloat16)
_MAKE = "Make a cache with RingBuffer.empty, and map it with jax.vmap."
# More are a prefill: their products fill the matrix unit, and XLA does them as well.
KERNEL_TOKENS = 8


def check_cache(cache) -> None:
    if not isinstance(cache, RingBuffer):
        raise ValueError(
            f"cache: got a {type(cache).__name__}; it must be a smalti.decode.RingBuffer. Make one "
            "with RingBuffer.empty(batch, kv_heads, head_dim, window=…, dtype=…)."
        )
    for name, x in (("k", cache.k), ("v", cache.v), ("length", cache.length)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(
                f"cache.{name}: got a {type(x).__name__}; it must be a JAX or NumPy array. {_MAKE}"
            )
    for name, least in (("sinks", 0), ("window", 1)):
        size = getattr(cache, name)
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < least:
            raise ValueError(
                f"cache.{name}: got {size!r}; it must be a Python int of at least {least}. {_MAKE}"
            )
    for name, x in (("k", cache.k), ("v", cache.v)):
        if x.ndim != 4 or x.dtype not in DTYPES:
            raise ValueError(
                f"cache.{name}: got {x.dtype}{list(x.shape)}; it must be float32, bfloat16 or "
                f"float16 of four dimensions, [B, Hkv, rows, D]. {_MAKE}"
            )
    B, Hkv, _, D = cache.k.shape
    rows = RingBuffer.rows(cache.sinks, cache.window, D, cache.v.shape[3])
    for name, x in (("k", cache.k), ("v", cache.v)):
        if x.shape[:3] != (B, Hkv, rows) or x.dtype != cache.k.dtype:
            raise ValueError(
                f"cache.{name}: got {x.dtype}{list(x.shape)}; it must be {cache.k.dtype} "
                f"[B={B}, Hkv={Hkv}, {rows}, D], by cache.k and because {cache.sinks} + "
                f"{cache.window} slots take so many rows in memory. {_MAKE}"
            )
    if cache.length.shape != (B,) or cache.length.dtype != jnp.int32:
        raise ValueError(
            f"cache.length: got {cache.length.dtype}{list(cache.length.shape)}; it must be int32 "
            f"[B={B}], how many tokens each sequence has had, by cache.k {list(cache.k.shape)}. "
            f"{_MAKE}"
        )


def heads_first(name: str, x, cache: RingBuffer, layout: str):
    """``[B, H, T, D]`` of an array of new tokens, checked against the cache."""
    suggest("layout", layout, LAYOUTS)
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(
            f"{name}: got a {type(x).__name__}; it must be a JAX or NumPy array. Convert it with "
            "jnp.asarray."
        )
    dims = {"BSHD": "[B, T, H, D]", "BHSD": "[B, H, T, D]"}[layout]
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name}: got shape {list(x.shape)} with layout={layout!r}; it must be {dims} without "
            "an empty axis. A single token has T = 1: x[:, None]."
        )
    if not any(x.dtype == dtype for dtype in DTYPES) or x.dtype != cache.k.dtype:
        raise ValueError(
            f"{name}: got dtype {x.dtype}; it must be the cache's, {cache.k.dtype}, one of "
            f"float32, bfloat16 and float16. Cast it, or make the cache with dtype={x.dtype}."
        )
    x = jnp.asarray(x)
    return x.swapaxes(1, 2) if layout == "BSHD" else x


def check_new(k, v, cache: RingBuffer) -> None:
    """k, v: ``[B, H, T, D]``."""
    for name, x, rows in (("k", k, cache.k), ("v", v, cache.v)):
        B, Hkv, _, D = rows.shape
        if (x.shape[0], x.shape[1], x.shape[3]) != (B, Hkv, D):
            raise ValueError(
                f"{name}: got B={x.shape[0]}, Hkv={x.shape[1]}, D={x.shape[3]}; the cache has "
                f"B={B}, Hkv={Hkv}, D={D}. If heads and tokens are the other way around, pass the "
                "other layout; else make a cache of these sizes."
            )
    if k.shape[2] != v.shape[2]:
        raise ValueError(
            f"v: got {v.shape[2]} tokens; it must have as many as k, {k.shape[2]}. Pass keys and "
            "values of the same tokens."
        )


def check_query(q, k) -> None:
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(
            f"q: got B={q.shape[0]}, T={q.shape[2]}, D={q.shape[3]}; they must be k's, "
            f"B={k.shape[0]}, T={k.shape[2]}, D={k.shape[3]}: a query for each new token. Pass "
            "q, k and v of the same tokens."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q: got {q.shape[1]} heads over {k.shape[1]} heads of k and v; the former must be a "
            "multiple of the latter. Change one of them."
        )


def checked_lengths(lengths, B: int, T: int):
    """int32 ``[B]``, from 0 to T; raises where what is known is not."""
    if lengths is None:
        return jnp.full(B, T, jnp.int32)
    is_array = isinstance(lengths, jax.Array | np.ndarray)
    if not is_array or lengths.shape != (B,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        got = f"{lengths.dtype}{list(lengths.shape)}" if is_array else repr(lengths)
        raise ValueError(
            f"lengths: got {got}; it must be an integer array [B={B}], how many of the T={T} "
            "tokens are real in each sequence, the first ones; or None for all of them."
        )
    if not isinstance(lengths, core.Tracer):
        known = np.asarray(lengths)
        if known.min() < 0 or known.max() > T:
            raise ValueError(
                f"lengths: got values from {known.min()} to {known.max()}; they must be from 0 to "
                f"T={T}, for they count new tokens. The cache counts the earlier ones itself."
            )
    return jnp.clip(jnp.asarray(saturated(lengths)), 0, T)


def checked_rope(positions, theta, interleaved, rotary_dim, D: int) -> Rope | None:
    if positions is None:
        given = {"rope_theta": theta, "rotary_dim": rotary_dim, "rope_interleaved": interleaved}
        for name, value in given.items():
            if value is not None and value is not False:
                raise ValueError(
                    f"{name}: got {value!r} with positions=None, which rotates nothing. Pass "
                    "positions='cache' or 'absolute' as well, or leave it out."
                )
        return None
    suggest("positions", positions, POSITIONS)
    if D % 2:
        raise ValueError(
            f"q, k: got head size D={D} with positions={positions!r}; it must be even, because "
            "RoPE turns pairs of lanes. Use an even head size, or positions=None."
        )
    theta = 10_000.0 if theta is None else theta
    check_constant("rope_theta", theta)
    check_rotary(rotary_dim, interleaved, D)
    return Rope(
        head_dim=D,
        rotary_dim=D if rotary_dim is None else int(rotary_dim),
        theta=float(theta),
        interleaved=bool(interleaved),
    )


def checked_number(name: str, value, *, positive: bool) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"{name}: got a {type(value).__name__}; it must be a Python float, fixed when the "
            f"function is traced. Multiply q by what is learned or traced instead."
        )
    value = float(value)
    if not abs(value) <= float(np.finfo(np.float32).max) or (positive and value < 1e-30):
        what = "positive and finite" if positive else "finite"
        raise ValueError(
            f"{name}: got {value!r}; it must be {what} in float32. Leave it out for the default."
        )
    return value


def checked_implementation(implementation, interpret, *, T: int, dtype, platform: str) -> str:
    """What runs; a named one never falls back."""
    check_interpret(interpret)
    if implementation is not None:
        suggest("implementation", implementation, IMPLEMENTATIONS)
    if interpret is not None and implementation != "pallas":
        raise ValueError(
            f"interpret: got {interpret!r} with implementation={implementation!r}; only Pallas "
            "kernels can be interpreted. Pass implementation='pallas' as well, or leave it out."
        )
    takes_dtype, takes_tokens = dtype in KERNEL_DTYPES, T <= KERNEL_TOKENS
    if implementation is None:
        fits = platform == "tpu" and takes_dtype and takes_tokens
        return "pallas" if fits else "reference"
    if implementation == "pallas":
        if not takes_dtype:
            raise NotImplementedError(
                f"implementation='pallas': got dtype {dtype}; its kernel takes float32 and "
                "bfloat16, because Mosaic refuses float16. Use bfloat16, or "
                "implementation='reference'."
            )
        if not takes_tokens:
            raise NotImplementedError(
                f"implementation='pallas': got {T} new tokens; its kernel takes up to "
                f"{KERNEL_TOKENS}. Append a prompt with implementation='reference' or None."
            )
        if platform != "tpu" and not interpret:
            raise NotImplementedError(
                f"implementation='pallas': its kernel is for TPUs, and this is a {platform}. Pass "
                "interpret=True to run it in an interpreter (slow), or use "
                "implementation='reference' or None."
            )
    return implementation
