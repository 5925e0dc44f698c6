"""Documents packed into one sequence: who has whose id, and which tiles that leaves alive."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from smalti.masks.arguments import integers, size
from smalti.masks.mask_mod import Mask, TileStates, pytree
from smalti.masks.tiles import as_known

MOST = 2**26  # tokens; as many ids are made where documents are given by their lengths
NOBODY = np.iinfo(np.int32).max  # the least id of a tile without one


@pytree(static=("lengths",))
class Document(Mask):
    q_ids: Any  # int32 [1 or B, Sq]
    kv_ids: Any  # int32 [1 or B, Sk]
    lengths: tuple[int, ...] | None = None  # what the ids were made from, if from that

    def __call__(self, b, h, q_idx, kv_idx):
        q_ids, kv_ids = _id_at(self.q_ids, b, q_idx), _id_at(self.kv_ids, b, kv_idx)
        return (q_ids == kv_ids) & (q_ids >= 0)

    def bind(self, batch, heads, q_len, kv_len):
        del heads
        for side, ids, length in (("q", self.q_ids, q_len), ("kv", self.kv_ids, kv_len)):
            if self.lengths is not None and ids.shape[1] != length:
                raise ValueError(
                    f"document: its lengths sum to {ids.shape[1]}; here they must sum to "
                    f"{'Sq' if side == 'q' else 'Sk'} = {length}."
                )
            if ids.shape[0] not in (1, batch) or ids.shape[1] != length:
                raise ValueError(
                    f"document: {side} ids have shape {list(ids.shape)}; here they must be "
                    f"[{batch}, {length}] or [1, {length}]. Where Sq ≠ Sk give a tuple "
                    "(q_ids, kv_ids)."
                )
        return self

    def varies(self):
        return max(self.q_ids.shape[0], self.kv_ids.shape[0]) > 1, False

    def classify(self, tiles):
        """By the range of ids in a tile: exact where documents are packed one after another."""
        q_low, q_high, q_single = (
            x[:, None, :, None]
            for x in _id_ranges(self.q_ids, tiles.grid.block_q, tiles.q_tiles.reshape(-1))
        )
        b = np.arange(self.kv_ids.shape[0])[:, None, None, None]
        k_low, k_high, k_single = (
            x[b, tiles.kv_tiles] for x in _id_ranges(self.kv_ids, tiles.grid.block_kv)
        )
        some = (q_low <= k_high) & (k_low <= q_high)
        return TileStates(some, some & q_single & k_single)

    def borders(self, tiles):
        """Where a key tile's ids are not those of the tile before it, among the tiles between the
        first and the last that the row sees; known only for ids that ascend, padding apart."""
        q_ids, kv_ids = as_known(self.q_ids), as_known(self.kv_ids)
        if not (isinstance(q_ids, np.ndarray) and isinstance(kv_ids, np.ndarray)):
            return None
        q_ranges = _id_ranges(q_ids, tiles.grid.block_q, tiles.q_tiles.reshape(-1))[:2]
        kv_ranges = _id_ranges(kv_ids, tiles.grid.block_kv)
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

    def __repr__(self):
        if self.lengths is not None:
            return f"document(lengths={list(self.lengths)})"
        return f"document(ids {list(self.q_ids.shape)}, {list(self.kv_ids.shape)})"


def from_ids(ids) -> Document:
    q_ids, kv_ids = ids if isinstance(ids, tuple) and len(ids) == 2 else (ids, ids)
    return Document(_ids(q_ids), _ids(kv_ids))


def from_lengths(lengths) -> Document:
    if not isinstance(lengths, (list, tuple)) or not lengths:
        raise ValueError(
            f"document: lengths: got {lengths!r}; it must be a list of ints, the documents' "
            "lengths in tokens. Traced ones become ids: jnp.searchsorted(ends, positions, "
            "side='right')."
        )
    lengths = tuple(size(n, "document: lengths", 1) for n in lengths)
    if sum(lengths) > MOST:
        raise ValueError(
            f"document: its lengths sum to {sum(lengths)}; ids are made for at most {MOST} tokens."
        )
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    return Document(ids, ids, lengths)


def _ids(ids):
    ids = integers(ids, "document: ids", 2)
    if isinstance(ids, int) or ids.ndim == 0:
        raise ValueError("document: ids are one number; give one id per token, [S] or [B, S].")
    known, limits = as_known(ids), np.iinfo(np.int32)
    if isinstance(known, np.ndarray) and (known.min() < limits.min or known.max() > limits.max):
        raise ValueError(
            f"document: ids run from {known.min()} to {known.max()}; they must fit int32. "
            "Number the documents from 0."
        )
    return ids.astype(np.int32).reshape((1, -1) if ids.ndim == 1 else ids.shape)


def _id_at(ids, b, index):
    return jnp.asarray(ids)[b if ids.shape[0] > 1 else 0, index]


def _id_ranges(ids, block: int, tiles: np.ndarray | None = None):
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
