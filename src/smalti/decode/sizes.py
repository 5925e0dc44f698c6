"""What `RingBuffer.empty` accepts: sizes of which arrays can be made, and dtypes of attention."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from smalti.attention.validation import DTYPES, suggest

# Slots, and the tokens that are written to them, are counted in int32, where sums of two must fit.
MOST = 2**30
BYTES = 2**63 - 1  # an array's size is an int64


def check_sizes(**sizes) -> None:
    for name, size in sizes.items():
        least = 0 if name == "sinks" else 1
        is_int = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not is_int or size < least:
            raise ValueError(
                f"{name}: got {size!r}; it must be a Python int of at least {least}, for "
                "shapes are made of it."
            )


def checked_dtype(dtype) -> np.dtype:
    names = tuple(jnp.dtype(allowed).name for allowed in DTYPES)
    try:
        if dtype is None:  # NumPy's float64
            raise TypeError
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):  # what NumPy does not know, or nothing that names a dtype
        suggest("dtype", dtype, names)
        raise  # unreachable: no name of ours is one that NumPy does not know
    if found.name not in names or found != jnp.dtype(found.name):  # NumPy's have byte orders
        raise ValueError(
            f"dtype: got {found}; it must be that of the keys and values to come, one of "
            f"{', '.join(names)}, which attention takes. Pass k.dtype, or cast k and v."
        )
    return found


def check_fit(shapes, dtype: np.dtype, sizes: dict[str, int]) -> None:
    """Raises ValueError for arrays that no machine can have."""
    slots = sizes["sinks"] + sizes["window"]
    if max(*sizes.values(), slots) > MOST:
        what = f"each size, and sinks + window, must be at most {MOST}, for indices are int32"
        raise ValueError(too_large(shapes, dtype, sizes, what))
    if size_in_bytes(shapes, dtype) > BYTES:
        raise ValueError(too_large(shapes, dtype, sizes, "no machine has so many"))


def too_large(shapes, dtype: np.dtype, sizes: dict[str, int], why: str) -> str:
    """Says of a cache how many bytes it takes, and which of its sizes is the largest."""
    count = size_in_bytes(shapes, dtype)
    name = max(sizes, key=lambda name: sizes[name])
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"{name}: got {sizes[name]}, the largest of {given}; k and v of {dtype} would take "
        f"{count:,} bytes ({count / 2**30:,.1f} GiB); {why}. Make it smaller."
    )


def size_in_bytes(shapes, dtype: np.dtype) -> int:
    return sum(math.prod(map(int, shape)) for shape in shapes) * dtype.itemsize
