"""Numbers that masks are made of: what the constructors accept, and values by batch entry.

A value is an int, a scalar array, or an array ``[B]``, and may be traced.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from smalti.masks.tiles import as_known

# More tokens than any sequence has. Larger sizes and offsets mean the same as this, and sums of
# three of them stay within int32.
MANY = 2**29


_AS_FUNCTION = (
    "For a traced one write the mask as a function that captures it, such as "
    "mask=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx > q_idx - window)."
)


def size(value, name: str, least: int | None = None, traced: str = _AS_FUNCTION) -> int:
    """``traced``: what to do with a value that is not known yet."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or (least is not None and value < least):
        allowed = "an int" if least is None else f"an int of at least {least}"
        if isinstance(value, Tracer):
            kind = f"{value.dtype}{list(value.shape)}"
            raise ValueError(
                f"{name}: got the traced {kind}; it must be {allowed}, "
                f"known while tracing. {traced}"
            )
        advice = ""
        if isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0:
            advice = " Give int(…) of it."
        raise ValueError(f"{name}: got {value!r}; it must be {allowed}.{advice}")
    return max(-MANY, min(int(value), MANY))


def integers(value, name: str, ndim: int):
    """An int as it is; an integer array of at most ``ndim`` dimensions."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, (jax.Array, np.ndarray)):
        value = np.asarray(value)
    if value.size == 0:
        raise ValueError(f"{name}: got an empty array; it must hold at least one number.")
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.ndim > ndim:
        shapes = "a scalar or [B]" if ndim == 1 else "[S] or [B, S]"
        raise ValueError(
            f"{name}: got {value.dtype}{list(value.shape)}; it must be integers of shape {shapes}."
        )
    return value


def offset_or_none(offset, name: str):
    return None if offset is None else per_batch(offset, f"{name}: offset")


def per_batch(value, name: str):
    """Positions or lengths; beyond `MANY` they are as good as `MANY`."""
    value = integers(value, name, 1)
    if isinstance(value, int):
        return max(-MANY, min(value, MANY))
    return saturated(value).clip(-MANY, MANY)


def saturated(value):
    """An integer array as int32, its values beyond that as the nearest ones.

    Bounds must be compared with after this: in a narrower or unsigned dtype they wrap themselves.
    """
    own, limits = jnp.iinfo(value.dtype), np.iinfo(np.int32)
    if own.min < limits.min or own.max > limits.max:
        value = value.clip(max(own.min, limits.min), min(own.max, limits.max))
    return value.astype(np.int32)


def entries(value) -> int:
    """B for ``[B]``, else 1."""
    shape = np.shape(value) if value is not None else ()
    return shape[0] if shape else 1


def check_batch(value, batch: int, name: str):
    if entries(value) not in (1, batch):
        raise ValueError(
            f"{name} has {entries(value)} entries; it must be one number or one for each of the "
            f"{batch} batch entries."
        )


def at_batch(value, b):
    """The value for batch entry b."""
    if not np.shape(value):
        return value
    return jnp.asarray(value)[b if entries(value) > 1 else 0]


def over_tiles(value):
    """The value as ``[1 or B, 1, 1, 1]``, NumPy where known."""
    value = as_known(value)
    return value.reshape(-1, 1, 1, 1).astype(np.int32)


def show_value(value) -> str:
    return str(value) if value is None or isinstance(value, int) else f"array{list(value.shape)}"
