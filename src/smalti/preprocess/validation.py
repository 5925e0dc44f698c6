"""What `qk_norm_rope` accepts; messages say the argument, what it got, what it takes, advice."""

import difflib
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from smalti.tpu.launch import check_interpret

IMPLEMENTATIONS = ("xla", "pallas")
DTYPES = ("float32", "bfloat16", "float16")
KERNEL_DTYPES = ("float32", "bfloat16")


def as_array(name: str, x):
    """As a JAX array. Raises ValueError for what is none."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name}: got {x!r}, a {type(x).__name__}; it must be a JAX or NumPy array. Convert it "
            "with jnp.asarray."
        ) from None


def check_projections(q, k, v) -> None:
    """As they were given: JAX rounds an array of NumPy's float64."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(
                f"{name}: got a {type(x).__name__}; it must be a JAX or NumPy array. Convert it "
                "with jnp.asarray."
            )
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
            f"q, k: got head size D={D}; it must be even, because RoPE turns pairs of lanes. "
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


def check_positions(positions, given, B: int, S: int) -> None:
    """given: positions before `as_array`, which wraps 64 bits."""
    if positions is None:
        return
    check_range("positions", given)
    if positions.shape not in ((S,), (B, S)) or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"positions: got {positions.dtype}{list(positions.shape)}; it must be integer [S={S}] "
            f"or [B={B}, S={S}], or None for 0 … S−1. Cast with positions.astype(jnp.int32); a "
            "shift alone is position_offset."
        )


def check_range(name: str, given) -> None:
    """Raises ValueError for known integers beyond int32."""
    if isinstance(given, core.Tracer) or getattr(given, "dtype", None) == jnp.int32:
        return
    known = np.asarray(given)
    if known.dtype.kind in "iu" and known.size:
        for value in (int(known.min()), int(known.max())):
            if not -(2**31) <= value < 2**31:
                raise ValueError(
                    f"{name}: got {value}; it must fit int32. Subtract a constant: attention sees "
                    "differences of positions alone."
                )


def check_offset(offset, B: int) -> None:
    if isinstance(offset, int) and not isinstance(offset, bool):
        return check_range("position_offset", offset)
    if isinstance(offset, np.ndarray | np.integer | jax.Array):
        if offset.shape in ((), (B,)) and jnp.issubdtype(offset.dtype, jnp.integer):
            return check_range("position_offset", offset)
        got = f"{offset.dtype}{list(offset.shape)}"
    else:
        got = repr(offset)
    raise ValueError(
        f"position_offset: got {got}; it must be an int32, a scalar or [B={B}]. What differs by "
        "token goes into positions."
    )


def check_rotary(rotary_dim, interleaved, D: int) -> None:
    if not isinstance(interleaved, bool | np.bool_):
        raise ValueError(
            f"rope_interleaved: got {interleaved!r}; it must be True, for pairs (2i, 2i + 1), or "
            "False, for (i, i + rotary_dim/2)."
        )
    if rotary_dim is None:
        return
    if not isinstance(rotary_dim, int | np.integer) or isinstance(rotary_dim, bool):
        raise ValueError(
            f"rotary_dim: got {rotary_dim!r}; it must be a Python int, or None for all D={D} lanes."
            " Of a fraction pass int(fraction * D)."
        )
    if not 2 <= rotary_dim <= D or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim: got {rotary_dim}; it must be even and from 2 to D={D}, because RoPE "
            "turns pairs of lanes. Leave it out to turn all of them."
        )


def check_constant(name: str, value) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"{name}: got a {type(value).__name__}; it must be a Python float, fixed when the "
            f"function is traced. Pass float({name})."
        )
    limits = np.finfo(np.float32)
    if value < float(limits.tiny) or not value <= float(limits.max):
        without = " None leaves the normalisation out." if name == "norm_eps" else ""
        raise ValueError(
            f"{name}: got {value}; it must be positive and finite in float32. Leave it out to get "
            "the default." + without
        )


def check_implementation(implementation, interpret) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        close = difflib.get_close_matches(str(implementation).lower(), IMPLEMENTATIONS, n=1)
        advice = f"Did you mean {close[0]!r}?" if close else "None picks by platform."
        raise ValueError(
            f"implementation: got {implementation!r}; it must be one of {IMPLEMENTATIONS} or None. "
            f"{advice}"
        )
    check_interpret(interpret)
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
