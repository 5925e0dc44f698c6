"""What jax's and tokamax's splash attention share: a kernel made for a mask, called per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from smalti.estimate.peers.arrays import clip, pad_length, padded_length, to_bhsd
from smalti.estimate.peers.case import AttentionCase


class Tile(NamedTuple):
    q: int
    kv: int  # keys in VMEM
    compute: int  # keys of one strip of a step

    def clipped(self, case: AttentionCase) -> Tile:
        return Tile(clip(self.q, case.Sq), clip(self.kv, case.Sk), clip(self.compute, case.Sk))


def tiles(q: tuple[int, ...], kv: tuple[int, ...], compute: tuple[int, ...]) -> tuple[Tile, ...]:
    """All that fit together, in the order given: the first sizes are the most promising."""
    return tuple(Tile(a, b, c) for a in q for b in kv for c in compute if b % c == 0)


class Lengths(NamedTuple):
    q: int
    kv: int


def lengths(case: AttentionCase, *used: Tile) -> Lengths | None:
    """The padded lengths for a kernel of these tiles; None where they do not fit together."""
    queries = padded_length(case.Sq, *(tile.q for tile in used))
    keys = padded_length(case.Sk, *(size for tile in used for size in (tile.kv, tile.compute)))
    strips = all(tile.kv % tile.compute == 0 for tile in used)
    return None if queries is None or keys is None or not strips else Lengths(queries, keys)


def fitting(case: AttentionCase, grid: tuple[Tile, ...], *others: Tile) -> list[Tile]:
    """The grid's tiles, clipped to the case, that fit it together with `others`; each once.

    Those that pad least come first, in the grid's order otherwise.
    """
    found = {}
    for tile in dict.fromkeys(tile.clipped(case) for tile in grid):
        padded = lengths(case, tile, *others)
        if padded is not None:
            found[tile] = padded.q * padded.kv
    return sorted(found, key=found.__getitem__)


def mask_of(case: AttentionCase, padded: Lengths, library: Any) -> Any:
    """The case's mask over the padded lengths. `library` is either splash's mask module.

    In the causal ones, padding keys lie behind the last key that a real query sees.
    """
    offset = case.Sk - case.Sq
    if case.window is not None:
        return library.LocalMask(tuple(padded), window_size=(case.window - 1, 0), offset=offset)
    if case.causal:
        return library.CausalMask(tuple(padded), offset=offset)
    return library.FullMask(tuple(padded))


def forward_of(
    case: AttentionCase, padded: Lengths, kernel: Any, segment_ids: Any, heads: str
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The case's forward with a splash kernel, in the case's layout.

    heads="mqa": `kernel` takes q [G, S, D] and k, v [S, D] and is mapped over key heads;
    "mha": it takes q [Hq, S, D] and k, v [Hkv, S, D]. A batch of one is indexed, not mapped.
    """
    # Mask tables are constants of the program, also where it is lowered for devices that are not
    # there: NumPy arrays belong to no device.
    kernel = jax.tree.map(np.asarray, kernel)
    segments = None
    if padded.kv != case.Sk and not case.causal:
        padding = (np.arange(padded.kv) >= case.Sk).astype(np.int32)
        segments = segment_ids(q=np.zeros(padded.q, np.int32), kv=padding)

    def attend(q, k, v):
        return kernel(q, k, v, segments)

    grouped = mapped(attend, case.Hkv) if heads == "mqa" else attend
    batched = mapped(grouped, case.B)

    def forward(q, k, v):
        q, k, v = to_bhsd(case, q, k, v)
        q = pad_length(q * case.scale, padded.q)
        k, v = pad_length(k, padded.kv), pad_length(v, padded.kv)
        if heads == "mqa":
            q = q.reshape(case.B, case.Hkv, case.Hq // case.Hkv, *q.shape[2:])
        out = batched(q, k, v)
        out = out.reshape(case.B, case.Hq, *out.shape[-2:])
        return to_bhsd(case, out[:, :, : case.Sq])[0]

    return forward


def mapped(fn: Callable[..., jax.Array], count: int) -> Callable[..., jax.Array]:
    """`fn` over the leading axis of its arguments, which has `count` members."""
    if count > 1:
        return jax.vmap(fn)
    return lambda *arrays: fn(*(array[0] for array in arrays))[None]
