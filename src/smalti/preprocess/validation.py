"""What `qk_norm_rope` accepts; messages say the argument, what it got, what it takes, advice."""

import difflib
import math
import numbers

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

IMPLEMENTATIONS = ("xla", "pallas")
DTYPES = ("float32", "bfloat16", "float16")
KERNEL_DTYPES = ("float32", "bfloat16")


def check_projections(q, k, v) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{name}: got shape {x.shape}; it must be [B, S, H, D] without an empty axis. "
                "Split the projection's last axis: x.reshape(B, S, H, D)."
            )
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(
                f"{name}: got dtype {x.dtype} (q has {q.dtype}); q, k and v must share one of "
                f"{', '.join(DTYPES)}. Cast with {name}.astype(…)."
            )
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"q, k, v: got [B, S] of {q.shape[:2]}, {k.shape[:2]} and {v.shape[:2]}; they must be "
            "equal, for one set of positions serves all. Prepare other lengths in calls of their "
            "own."
        )
    (Hq, D), (Hkv, Dk) = q.shape[2:], k.shape[2:]
    if Dk != D:
        raise ValueError(
            f"k: got head size {Dk}; it must be q's, {D}, for scores are their product. "
            "Check the reshape of the projection."
        )
    if D % 2:
        raise ValueError(
            f"q, k: got head size D={D}; it must be even, because RoPE turns pairs (i, i + D/2). "
            "Use an even head size."
        )
    if v.shape[2] != Hkv:
        raise ValueError(
            f"v: got {v.shape[2]} heads; it must have as many as k, {Hkv}. "
            "Check the reshape of the projection."
        )
    if Hq % Hkv:
        raise ValueError(
            f"q: got {Hq} heads over {Hkv} heads of k and v; the former must be a multiple of the "
            "latter. Change one of them."
        )


def check_scale(name: str, scale, D: int) -> None:
    if scale is None:
        return
    if scale.shape != (D,) or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            f"{name}: got {scale.dtype}{list(scale.shape)}; it must be floating [D={D}], shared by "
            "all heads, or None for no scale. Multiply per head after the call instead."
        )


def check_positions(positions, B: int, S: int) -> None:
    if positions is None:
        return
    if positions.shape not in ((S,), (B, S)) or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"positions: got {positions.dtype}{list(positions.shape)}; it must be integer [S={S}] "
            f"or [B={B}, S={S}], or None for 0 … S−1. Cast with positions.astype(jnp.int32)."
        )


def check_constant(name: str, value) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name}: got a {type(value).__name__}; it must be a Python float, fixed when the "
            f"function is traced. Pass float({name})."
        )
    if not (math.isfinite(value) and float(value) > 0):
        raise ValueError(
            f"{name}: got {value}; it must be positive and finite. Leave it out to get the default."
        )


def check_implementation(implementation, interpret) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        close = difflib.get_close_matches(str(implementation), IMPLEMENTATIONS, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else "None picks by platform."
        raise ValueError(
            f"implementation: got {implementation!r}; it must be one of {IMPLEMENTATIONS} or None. "
            f"{advice}"
        )
    if not (interpret is None or isinstance(interpret, bool | pltpu.InterpretParams)):
        raise ValueError(
            f"interpret: got {interpret!r}; it must be True, False, None or a "
            "jax.experimental.pallas.tpu.InterpretParams. Leave it out to compile."
        )
    if interpret and implementation != "pallas":
        raise ValueError(
            f"interpret: got {interpret!r} with implementation={implementation!r}; only Pallas "
            "kernels can be interpreted. Pass implementation='pallas' as well, or leave it out."
        )


def check_kernel(dtype, platform: str, interpret) -> None:
    """Whether the Pallas kernels can do it; they never hand it on to another implementation."""
    if dtype not in KERNEL_DTYPES:
        raise NotImplementedError(
            f"q, k, v: got dtype {dtype}; implementation='pallas' takes "
            f"{' and '.join(KERNEL_DTYPES)}, because Mosaic refuses {dtype}. Use bfloat16, or "
            "implementation='xla'."
        )
    if platform != "tpu" and not interpret:
        raise NotImplementedError(
            f"implementation: got 'pallas' on platform {platform!r}; the kernels compile for TPUs "
            "only. Pass interpret=True to run them slowly here, or implementation='xla'."
        )
