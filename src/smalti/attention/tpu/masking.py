"""Masks inside of kernels.

A band ``low ≤ key − query ≤ high`` with bounds that are known costs constants only. The other masks
of the catalogue and their combinations are evaluated on the tiles that they cut, from scalars in
SMEM (offsets, lengths) and rows of document ids in VMEM.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from smalti.attention.tpu.tiles import Band
from smalti.masks import Mask
from smalti.masks.catalogue import (
    Causal,
    Document,
    Full,
    Lengths,
    Local,
    PrefixLM,
    SlidingWindow,
    Streaming,
)
from smalti.masks.mask_mod import And, Not, Or
from smalti.masks.tiles import as_known

# The fields of each mask that are numbers, one for all or one a batch entry.
_NUMBERS = {
    Full: (),
    Causal: ("offset",),
    SlidingWindow: ("offset",),
    Local: ("offset",),
    Streaming: ("offset",),
    PrefixLM: ("offset", "prefix"),
    Lengths: ("q", "kv"),
}


Form = tuple[Any, ...]


class MaskArrays(NamedTuple):
    """What evaluating a mask reads."""

    numbers: Any  # int32 [n, 1 or B]
    q_ids: Any  # int32 [documents, 1 or B, Sq]
    kv_ids: Any  # int32 [documents, 1 or B, Sk]


NO_ARRAYS = MaskArrays(None, None, None)


def unsupported(mask: Mask) -> str | None:
    """What of the mask these kernels cannot evaluate, or None."""
    if isinstance(mask, (And, Or)):
        return unsupported(mask.left) or unsupported(mask.right)
    if isinstance(mask, Not):
        return unsupported(mask.inner)
    known = type(mask) in _NUMBERS or isinstance(mask, Document)
    return None if known else repr(mask)


def band(mask: Mask) -> Band | None:
    """``(low, high)`` where the mask is ``low ≤ key − query ≤ high`` with known bounds (None: no
    bound), else None."""
    if isinstance(mask, And):
        left, right = band(mask.left), band(mask.right)
        if left is None or right is None:
            return None
        return _both(max, left[0], right[0]), _both(min, left[1], right[1])
    if isinstance(mask, Full):
        return None, None
    if not isinstance(mask, (Causal, SlidingWindow, Local)):
        return None
    offset = as_known(mask.offset)
    if not isinstance(offset, np.ndarray) or (offset != offset.reshape(-1)[0]).any():
        return None
    offset = int(offset.reshape(-1)[0])
    if isinstance(mask, Local):
        return offset - mask.left, offset + mask.right
    return (offset - mask.window + 1 if isinstance(mask, SlidingWindow) else None), offset


def name_in_table(band: Band | None) -> str | None:
    """What tables of block sizes call a mask with this band; None where they have no name."""
    if band is None:
        return None
    low, high = band
    if low is None:
        return "full" if high is None else "causal"
    return f"sliding_window({high - low + 1})" if high is not None and low <= high else None


def _both(choose, a: int | None, b: int | None) -> int | None:
    return choose(a, b) if a is not None and b is not None else b if a is None else a


def count_documents(mask: Mask) -> int:
    """How many pairs of rows of ids the mask compares."""
    return sum(isinstance(leaf, Document) for leaf in _leaves(mask))


def arrays_of(mask: Mask) -> MaskArrays:
    """The arrays of a mask, in the order in which `visible` asks for them."""
    numbers, q_ids, kv_ids = [], [], []
    for leaf in _leaves(mask):
        if isinstance(leaf, Document):
            q_ids.append(leaf.q_ids)
            kv_ids.append(leaf.kv_ids)
        else:
            numbers += [jnp.reshape(getattr(leaf, name), -1) for name in _given(leaf)]
    return MaskArrays(_stack(numbers), *_same_batch(_stack(q_ids), _stack(kv_ids)))


def padded(arrays: MaskArrays, q_len: int, kv_len: int) -> MaskArrays:
    """With ids padded as what nobody sees."""

    def pad(ids, length: int):
        if ids is None:
            return None
        return jnp.pad(ids, ((0, 0), (0, 0), (0, length - ids.shape[2])), constant_values=-1)

    return arrays._replace(q_ids=pad(arrays.q_ids, q_len), kv_ids=pad(arrays.kv_ids, kv_len))


def form(mask: Mask) -> Form:
    """The mask without its arrays, as nested tuples: fixed in a kernel, and hashable."""
    if isinstance(mask, (And, Or)):
        return type(mask), form(mask.left), form(mask.right)
    if isinstance(mask, Not):
        return Not, form(mask.inner)
    if isinstance(mask, Document):
        return (Document,)
    fixed = tuple(
        (field.name, getattr(mask, field.name))
        for field in dataclasses.fields(type(mask))  # pyright: ignore[reportArgumentType]
        if field.name not in _NUMBERS[type(mask)]
    )
    return type(mask), tuple(_given(mask)), fixed


def visible(form: Form, numbers: list, ids: list, q_idx, kv_idx):
    """Whether a mask lets queries see keys, inside of a kernel.

    numbers: scalars; ids: pairs (of the queries, of the keys) that broadcast to the tile. Both are
    in the order of `arrays_of`, and are used up. q_idx, kv_idx: int32 that broadcast to the tile.
    """
    kind, *rest = form
    if kind in (And, Or):
        left = visible(rest[0], numbers, ids, q_idx, kv_idx)
        right = visible(rest[1], numbers, ids, q_idx, kv_idx)
        return left & right if kind is And else left | right
    if kind is Not:
        return ~visible(rest[0], numbers, ids, q_idx, kv_idx)
    if kind is Document:
        q_ids, kv_ids = ids.pop(0)
        return (q_ids == kv_ids) & (q_ids >= 0)
    names, fixed = rest
    fields = dict.fromkeys(_NUMBERS[kind]) | dict(fixed) | {name: numbers.pop(0) for name in names}
    return kind(**fields)(0, 0, q_idx, kv_idx)


def _given(mask: Mask) -> list[str]:
    return [name for name in _NUMBERS[type(mask)] if getattr(mask, name) is not None]


def _leaves(mask: Mask):
    if isinstance(mask, (And, Or)):
        yield from _leaves(mask.left)
        yield from _leaves(mask.right)
    elif isinstance(mask, Not):
        yield from _leaves(mask.inner)
    else:
        yield mask


def _stack(arrays: list):
    """``[n, 1 or B, …]``, or None for no array."""
    if not arrays:
        return None
    arrays = [jnp.asarray(x, jnp.int32) for x in arrays]
    most = max(x.shape[0] for x in arrays)
    return jnp.stack([jnp.broadcast_to(x, (most, *x.shape[1:])) for x in arrays])


def _same_batch(q_ids, kv_ids):
    if q_ids is None:
        return None, None
    most = max(q_ids.shape[1], kv_ids.shape[1])
    return tuple(jnp.broadcast_to(x, (x.shape[0], most, x.shape[2])) for x in (q_ids, kv_ids))
