"""What `smalti.attention` accepts, checked once at its edge; kernels get canonical arguments."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smalti.attention.block_sizes import BlockSizes
from smalti.masks import BlockMask, Mask, document, full
from smalti.masks.mask_mod import as_mask
from smalti.masks.traced_mod import TracedMod, trace_mod

LAYOUTS = ("BSHD", "BHSD")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Canonical:
    """Checked arguments in the layout that implementations take."""

    q: Any  # [B, Hq, Sq, D]
    k: Any  # [B, Hkv, Sk, D]
    v: Any  # [B, Hkv, Sk, Dv]
    mask: Mask | BlockMask  # bound; segment ids folded in
    score_mod: TracedMod | None
    bias: Any  # [B or 1, Hq or 1, Sq or 1, Sk or 1] or None
    sinks: Any  # [Hq] or None
    scale: float
    softcap: float | None


def canonical(q, k, v, *, mask, score_mod, bias, segment_ids, softcap, scale, sinks, layout):
    """Check everything that does not depend on the implementation.

    Raises ValueError or TypeError, naming the argument, what was got and what is allowed.
    """
    suggest("layout", layout, LAYOUTS)
    q, k, v = (_array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    _check_shapes(q, k, v, layout)
    if layout == "BSHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    sizes = (batch, heads, q_len, kv_len)
    return Canonical(
        q,
        k,
        v,
        mask=_mask(mask, segment_ids, sizes),
        score_mod=_score_mod(score_mod),
        bias=None if bias is None else _bias(bias, sizes),
        sinks=None if sinks is None else _sinks(sinks, heads),
        scale=1 / dim**0.5 if scale is None else _number(scale, "scale"),
        softcap=None if softcap is None else _softcap(softcap),
    )


def suggest(argument: str, value, allowed: tuple[str, ...]):
    """Raise ValueError unless ``value`` is one of ``allowed``, naming the nearest."""
    if isinstance(value, str) and value in allowed:
        return
    by_lower = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.5)
    hint = f" Did you mean {by_lower[near[0]]!r}?" if near else ""
    raise ValueError(
        f"{argument}: got {value!r}; allowed are {', '.join(map(repr, allowed))}.{hint}"
    )


def check_block_sizes(block_sizes):
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise ValueError(
            f"block_sizes: got {block_sizes!r}; it must be a smalti.BlockSizes. "
            "Write smalti.BlockSizes(block_q=…, block_kv=…)."
        )


def _array(x, name: str):
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ValueError(
            f"{name}: got {type(x).__name__}; it must be a JAX or NumPy array. "
            "Convert it with jnp.asarray."
        )
    if not any(x.dtype == dtype for dtype in DTYPES):
        raise ValueError(
            f"{name}: got dtype {x.dtype}; allowed are float32, bfloat16 and float16. "
            f"Cast it, e.g. {name}.astype(jnp.float32)."
        )
    return jnp.asarray(x)


def _check_shapes(q, k, v, layout: str):
    got = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} with layout={layout!r}"
    dims = {"BSHD": "[B, S, H, D]", "BHSD": "[B, H, S, D]"}[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: {got}; each must have four dimensions, {dims}.")
        if 0 in x.shape:
            raise ValueError(f"{name}: {got}; every dimension must be at least 1.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"k, v: got q {q.dtype}, k {k.dtype}, v {v.dtype}; they must share one dtype."
        )
    seq, head = layout.index("S"), layout.index("H")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"k, v: {got}; the batch size B must be the same in all three.")
    if k.shape[seq] != v.shape[seq] or k.shape[head] != v.shape[head]:
        raise ValueError(f"v: {got}; k and v must have the same length Sk and heads Hkv.")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k: {got}; q and k must have the same head size D.")
    if q.shape[head] % k.shape[head]:
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        raise ValueError(
            f"k: {got}; the query heads ({q.shape[head]}) must be a multiple of the key heads "
            f"({k.shape[head]}). If the arrays are laid out the other way, pass layout={other!r}."
        )


def _mask(mask, segment_ids, sizes) -> Mask | BlockMask:
    if isinstance(mask, BlockMask):
        _check_block_mask(mask, sizes)
        if segment_ids is None:
            return mask
        mask = mask.mask
    mask = full() if mask is None else as_mask(mask)
    if segment_ids is not None:
        mask = mask & _segments(segment_ids, sizes)
    return mask.bind(*sizes)


def _check_block_mask(mask: BlockMask, sizes):
    grid = mask.grid
    own = (grid.batch, grid.heads, grid.q_len, grid.kv_len)
    varies = mask.mask.varies()
    fits = all(
        a == b or (i < 2 and not varies[i]) for i, (a, b) in enumerate(zip(own, sizes, strict=True))
    )
    if not fits:
        advice = "build one for these sizes with smalti.build_block_mask"
        _, heads, q_len, kv_len = sizes
        if grid.heads == q_len == kv_len and grid.q_len == grid.kv_len == heads:
            advice = (
                "heads and tokens look swapped: smalti.flex_pallas_attention takes [B, H, S, D], "
                "and smalti.attention [B, S, H, D] unless layout='BHSD'"
            )
        raise ValueError(
            f"mask: this BlockMask was built for [B, Hq, Sq, Sk] = {list(own)} and is used at "
            f"{list(sizes)}; {advice}."
        )


def check_block_mask_tiles(mask, block_sizes: BlockSizes | None):
    """A BlockMask's tiles are its own; `block_sizes` may only repeat them."""
    if not isinstance(mask, BlockMask) or block_sizes is None:
        return
    grid = mask.grid
    asked = min(block_sizes.block_q, grid.q_len), min(block_sizes.block_kv, grid.kv_len)
    if asked != (grid.block_q, grid.block_kv):
        raise ValueError(
            f"block_sizes: got {block_sizes} with a BlockMask of block_q={grid.block_q}, "
            f"block_kv={grid.block_kv}; its tiles are those it was built for. Leave block_sizes "
            "out, or build a BlockMask of these sizes with smalti.build_block_mask."
        )


def _segments(segment_ids, sizes) -> Mask:
    batch, _, q_len, kv_len = sizes
    pair = isinstance(segment_ids, (tuple, list)) and len(segment_ids) == 2
    if not pair and q_len != kv_len:
        raise ValueError(
            f"segment_ids: Sq = {q_len} and Sk = {kv_len} differ, so give a pair "
            "(q_segment_ids [B, Sq], kv_segment_ids [B, Sk])."
        )
    q_ids, kv_ids = segment_ids if pair else (segment_ids, segment_ids)
    for ids, length in ((q_ids, q_len), (kv_ids, kv_len)):
        is_array = isinstance(ids, (jax.Array, np.ndarray))
        if not is_array or not jnp.issubdtype(ids.dtype, jnp.integer):
            got = ids.dtype if is_array else type(ids).__name__
            raise ValueError(
                f"segment_ids: got {got}; they must be integer arrays. "
                "Cast them with .astype(jnp.int32)."
            )
        if ids.shape != (batch, length):
            raise ValueError(
                f"segment_ids: got shape {list(ids.shape)}; it must be [B, S], "
                f"here [{batch}, {length}]."
            )
    return document((q_ids, kv_ids))


def _score_mod(score_mod) -> TracedMod | None:
    if score_mod is None:
        return None
    if not callable(score_mod):
        raise ValueError(
            f"score_mod: got {type(score_mod).__name__}; it must be a function "
            "score_mod(score, b, h, q_idx, kv_idx)."
        )
    score, index = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    mod = trace_mod(score_mod, (score, *(index,) * 4), name="score_mod", result=float)
    return mod.widened()


def _bias(bias, sizes):
    is_array = isinstance(bias, (jax.Array, np.ndarray))
    if not is_array or not any(bias.dtype == dtype for dtype in DTYPES):
        got = f"dtype {bias.dtype}" if is_array else type(bias).__name__
        raise ValueError(
            f"bias: got {got}; it must be a float32, bfloat16 or float16 array. "
            "A boolean array is a mask: pass it as mask=."
        )
    shape = (1,) * (4 - bias.ndim) + bias.shape
    if len(shape) != 4 or any(n not in (1, s) for n, s in zip(shape, sizes, strict=True)):
        raise ValueError(
            f"bias: got shape {list(bias.shape)}; it must broadcast to [B, Hq, Sq, Sk] = "
            f"{list(sizes)}."
        )
    return jnp.asarray(bias).reshape(shape)


def _sinks(sinks, heads: int):
    is_array = isinstance(sinks, (jax.Array, np.ndarray))
    if not is_array or not any(sinks.dtype == dtype for dtype in DTYPES) or sinks.shape != (heads,):
        got = f"{sinks.dtype}{list(sinks.shape)}" if is_array else type(sinks).__name__
        raise ValueError(
            f"sinks: got {got}; it must be a floating array of shape [Hq] = [{heads}], one logit "
            "a query head. (The first tokens of StreamingLLM are masks.streaming(sinks=…).)"
        )
    return jnp.asarray(sinks)


def _number(value, name: str) -> float:
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name}: got an array; it must be a Python float. For one that is traced or learned "
            "use score_mod=lambda score, b, h, q_idx, kv_idx: …, which has gradients."
        )
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: got {value!r}; it must be a Python float.")
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name}: got {value!r}; it must be finite in float32.")
    return float(value)


def _softcap(softcap) -> float:
    softcap = _number(softcap, "softcap")
    if not 1e-30 <= softcap <= 1e38:  # times log2(e), and scale over it, are float32 too
        raise ValueError(
            f"softcap: got {softcap}; it must be positive, from 1e-30 to 1e38. "
            "Leave it out for no cap."
        )
    return softcap
