"""Ids of documents packed into one sequence: what is accepted, their ranges by tile, and where
those change."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from smalti.masks.arguments import integers, saturated, size
from smalti.masks.tiles import Tiles, as_known

MOST = 2**26  # tokens; as many ids are made where documents are given by their lengths
_AS_IDS = "Traced ones become ids: jnp.searchsorted(ends, positions, side='right')."
NOBODY = np.iinfo(np.int32).max  # the least id of a tile without one


def check_lengths(lengths) -> tuple[int, ...]:
    """The lengths of packed documents, as ids can be made of them."""
    if not isinstance(lengths, (list, tuple)) or not lengths:
        raise ValueError(
            f"document: lengths: got {lengths!r}; it must be a list of ints, the documents' "
            f"lengths in tokens. {_AS_IDS}"
        )
    lengths = tuple(size(n, "document: lengths", 1, _AS_IDS) for n in lengths)
    if sum(lengths) > MOST:
        raise ValueError(
            f"document: its lengths sum to {sum(lengths)}; ids are made for at most {MOST} tokens."
        )
    return lengths


def check_ids(ids):
    """Ids as int32 ``[1 or B, S]``; traced ones beyond that are one document, or padding."""
    ids = integers(ids, "document: ids", 2)
    if isinstance(ids, int) or ids.ndim == 0:
        raise ValueError("document: ids are one number; give one id per token, [S] or [B, S].")
    known, limits = as_known(ids), np.iinfo(np.int32)
    if isinstance(known, np.ndarray) and (known.min() < limits.min or known.max() > limits.max):
        raise ValueError(
            f"document: ids run from {known.min()} to {known.max()}; they must fit int32. "
            "Number the documents from 0."
        )
    return saturated(ids).reshape((1, -1) if ids.ndim == 1 else ids.shape)


def borders(q_ids, kv_ids, tiles: Tiles) -> list | None:
    """Where a key tile's ids are not those of the tile before it, among the tiles between the
    first and the last that the row sees; known only for ids that ascend, padding apart."""
    q_ids, kv_ids = as_known(q_ids), as_known(kv_ids)
    if not (isinstance(q_ids, np.ndarray) and isinstance(kv_ids, np.ndarray)):
        return None
    q_ranges = id_ranges(q_ids, tiles.grid.block_q, tiles.q_tiles.reshape(-1))[:2]
    kv_ranges = id_ranges(kv_ids, tiles.grid.block_kv)
    found = []
    for b in range(max(len(q_ids), len(kv_ids))):
        low, high, single = (x[b if len(kv_ids) > 1 else 0] for x in kv_ranges)
        seen = np.flatnonzero(low <= high)
        if (np.diff(low[seen]) < 0).any() or (np.diff(high[seen]) < 0).any():
            return None
        q_low, q_high = (x[b if len(q_ids) > 1 else 0] for x in q_ranges)
        first = np.searchsorted(high[seen], q_low)
        last = np.searchsorted(low[seen], q_high, side="right") - 1
        sees = first <= last
        seen = np.append(seen, 0)
        first, last = (seen[np.where(sees, x, -1)] for x in (first, last))
        changes = [x[1:] != x[:-1] for x in (low, high, single)]
        changes = np.append(0, np.flatnonzero(np.logical_or.reduce(changes)) + 1)
        begin = np.searchsorted(changes, first)
        end = np.searchsorted(changes, last, side="right")  # the first one past the last tile
        place = begin[:, None] + np.arange((end - begin).max() + 1)
        place = np.minimum(np.minimum(place, end[:, None]), changes.size - 1)
        found.append(changes[place] * tiles.grid.block_kv)
    most = max(x.shape[1] for x in found)
    found = [np.pad(x, ((0, 0), (0, most - x.shape[1])), mode="edge") for x in found]
    return [np.stack(found)[:, None].astype(np.int32)]


def id_at(ids, b, index):
    return jnp.asarray(ids)[b if ids.shape[0] > 1 else 0, index]


def id_ranges(ids, block: int, tiles: np.ndarray | None = None):
    """Per tile the least and greatest visible id, and whether it holds just one id, unpadded.

    ``[1 or B, n]`` each, of all tiles or of some. A tile without a visible id has least > greatest.
    """
    ids = as_known(ids)
    xp: Any = np if isinstance(ids, np.ndarray) else jnp
    # A ragged last tile repeats the last id: that changes neither range nor padding.
    by_tile = xp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    by_tile = by_tile.reshape(ids.shape[0], -1, block)
    by_tile = by_tile if tiles is None else by_tile[:, tiles]
    least, high = by_tile.min(-1), by_tile.max(-1)
    low = xp.where(by_tile < 0, NOBODY, by_tile).min(-1)
    return low, high, (least >= 0) & (low == high)
