"""The masks that people train and serve with, each in its plain formula and in closed form by tile.

``q_idx`` and ``kv_idx`` count from 0. In the causal masks the query's position among the keys is
``i = q_idx + offset``; ``offset`` defaults to ``Sk − Sq`` at the call, so that the last query meets
the last key. An offset may be an int, a traced scalar, or an int32 array ``[B]``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from smalti.masks import documents
from smalti.masks.arguments import (
    at_batch,
    check_batch,
    entries,
    offset_or_none,
    over_tiles,
    per_batch,
    show_value,
    size,
)
from smalti.masks.mask_mod import Mask, TileStates, pytree


def _factory(function):
    """Mark a catalogue function, so that ``mask=causal`` (not called) gets advice."""
    function.is_mask_factory = True
    return function


@_factory
def full() -> Mask:
    """Every query sees every key."""
    return Full()


@_factory
def causal(offset=None) -> Mask:
    """``j ≤ i``."""
    return Causal(offset_or_none(offset, "causal"))


@_factory
def sliding_window(window: int, offset=None) -> Mask:
    """Exactly ``window`` keys, the query's own last: ``max(0, i − window + 1) ≤ j ≤ i``."""
    return SlidingWindow(
        offset_or_none(offset, "sliding_window"), size(window, "sliding_window: window", 1)
    )


@_factory
def local(left: int, right: int, offset=0) -> Mask:
    """``left`` keys before the query and ``right`` after it: ``i − left ≤ j ≤ i + right``; either
    may be negative.

    Not a causal mask: ``offset`` is 0 unless given.
    """
    left, right = size(left, "local: left"), size(right, "local: right")
    return Local(offset_or_none(offset, "local"), left, right)


@_factory
def streaming(*, sinks: int, window: int, offset=None) -> Mask:
    """StreamingLLM (arXiv:2309.17453): ``j < sinks`` or ``max(sinks, i − window + 1) ≤ j``, and
    ``j ≤ i``: the first ``sinks`` tokens and the last ``window``."""
    return Streaming(
        offset_or_none(offset, "streaming"),
        size(sinks, "streaming: sinks", 0),
        size(window, "streaming: window", 1),
    )


@_factory
def prefix_lm(prefix, offset=None) -> Mask:
    """Everybody sees the first ``prefix`` keys, the rest is causal: ``j < prefix`` or ``j ≤ i``.

    ``prefix``: an int, a traced scalar, or an int32 array ``[B]``.
    """
    return PrefixLM(offset_or_none(offset, "prefix_lm"), per_batch(prefix, "prefix_lm: prefix"))


@_factory
def document(ids=None, *, lengths=None) -> Mask:
    """A query sees the keys of its own document; negative ids are padding that nobody sees.

    ``ids``: int32 ``[S]`` or ``[B, S]``, or a tuple ``(q_ids, kv_ids)`` of lengths Sq and Sk;
    they may be traced. Or ``lengths``: a list of ints that sum to S, documents packed one after
    another.
    """
    if (ids is None) == (lengths is None):
        raise ValueError("document: give ids, one for each token, or lengths=, but not both.")
    if lengths is not None:
        lengths = documents.check_lengths(lengths)
        ids = documents.check_ids(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        return Document(ids, ids, lengths)
    q_ids, kv_ids = ids if isinstance(ids, tuple) and len(ids) == 2 else (ids, ids)
    return Document(documents.check_ids(q_ids), documents.check_ids(kv_ids))


@_factory
def lengths(*, q=None, kv=None) -> Mask:
    """Only the first ``q`` queries and ``kv`` keys are real; each an int, a traced scalar or
    int32 ``[B]``, or None for all of them."""
    if q is None and kv is None:
        raise ValueError("lengths: give q=, kv= or both; with neither, use full().")
    return Lengths(
        None if q is None else per_batch(q, "lengths: q"),
        None if kv is None else per_batch(kv, "lengths: kv"),
    )


@pytree()
class Full(Mask):
    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.ones(jnp.broadcast_shapes(jnp.shape(q_idx), jnp.shape(kv_idx)), bool)

    def classify(self, tiles):
        yes = np.ones(tiles.shape, bool)
        return TileStates(yes, yes)

    def borders(self, tiles):
        return []

    def __repr__(self):
        return "full()"


@pytree()
class _Offset(Mask):
    """What the masks along a diagonal share: the query's position ``i = q_idx + offset``."""

    offset: Any  # int, scalar array or [B]; None until bound

    def bind(self, batch, heads, q_len, kv_len):
        del heads
        if self.offset is None:
            return dataclasses.replace(self, offset=kv_len - q_len)
        check_batch(self.offset, batch, f"{self!r}: offset")
        return self

    def varies(self):
        return entries(self.offset) > 1, False

    def position(self, b, q_idx):
        if self.offset is None:
            raise ValueError(
                f"{self!r}: its offset is Sk − Sq of the call and not known outside one; "
                "give offset= to use the mask by itself."
            )
        return q_idx + at_batch(self.offset, b)

    def band(self, tiles, left, right) -> TileStates:
        """``i − left ≤ j ≤ i + right`` by tile, exactly; None is no bound."""
        offset = over_tiles(self.offset)
        first, last = tiles.q_first + offset, tiles.q_last + offset  # positions of the tile's rows
        some = every = np.ones(tiles.shape, bool)
        if right is not None:
            some = some & (tiles.kv_first <= last + right)
            every = every & (tiles.kv_last <= first + right)
        if left is not None:
            some = some & (tiles.kv_last >= first - left)
            every = every & (tiles.kv_first >= last - left)
        return TileStates(some, every)

    def ends(self, tiles, *distances: int) -> list:
        """The borders of a band: ``i + distance`` of the row's first and last query."""
        offset = over_tiles(self.offset)
        return [i + offset + d for i in (tiles.q_first, tiles.q_last) for d in distances]

    def _suffix(self) -> str:
        return "" if self.offset is None else f", offset={show_value(self.offset)}"


@pytree()
class Causal(_Offset):
    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= self.position(b, q_idx)

    def classify(self, tiles):
        return self.band(tiles, None, 0)

    def borders(self, tiles):
        return self.ends(tiles, 0)

    def __repr__(self):
        return f"causal({self._suffix()[2:]})"


@pytree(static=("window",))
class SlidingWindow(_Offset):
    window: int

    def __call__(self, b, h, q_idx, kv_idx):
        i = self.position(b, q_idx)
        return (kv_idx <= i) & (kv_idx > i - self.window)

    def classify(self, tiles):
        return self.band(tiles, self.window - 1, 0)

    def borders(self, tiles):
        return self.ends(tiles, 1 - self.window, 0)

    def __repr__(self):
        return f"sliding_window({self.window}{self._suffix()})"


@pytree(static=("left", "right"))
class Local(_Offset):
    left: int
    right: int

    def __call__(self, b, h, q_idx, kv_idx):
        i = self.position(b, q_idx)
        return (kv_idx >= i - self.left) & (kv_idx <= i + self.right)

    def classify(self, tiles):
        return self.band(tiles, self.left, self.right)

    def borders(self, tiles):
        return self.ends(tiles, -self.left, self.right)

    def __repr__(self):
        return f"local({self.left}, {self.right}{self._suffix()})"


@pytree(static=("sinks", "window"))
class Streaming(_Offset):
    sinks: int
    window: int

    def __call__(self, b, h, q_idx, kv_idx):
        i = self.position(b, q_idx)
        return (kv_idx <= i) & ((kv_idx < self.sinks) | (kv_idx > i - self.window))

    def classify(self, tiles):
        past = self.band(tiles, None, 0)
        recent = self.band(tiles, self.window - 1, 0)
        sink_some, sink_every = tiles.kv_first < self.sinks, tiles.kv_last < self.sinks
        # For the tile's last query the window may begin where the sinks end: no gap between.
        no_gap = tiles.q_last + over_tiles(self.offset) - self.window < self.sinks
        return TileStates(
            (past.some & sink_some) | recent.some,
            (past.every & (sink_every | no_gap)) | recent.every,
        )

    def borders(self, tiles):
        return [*self.ends(tiles, 1 - self.window, 0), over_tiles(self.sinks)]

    def __repr__(self):
        return f"streaming(sinks={self.sinks}, window={self.window}{self._suffix()})"


@pytree()
class PrefixLM(_Offset):
    prefix: Any  # int, scalar array or [B]

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx < at_batch(self.prefix, b)) | (kv_idx <= self.position(b, q_idx))

    def bind(self, batch, heads, q_len, kv_len):
        check_batch(self.prefix, batch, "prefix_lm: prefix")
        return super().bind(batch, heads, q_len, kv_len)

    def varies(self):
        return max(entries(self.offset), entries(self.prefix)) > 1, False

    def classify(self, tiles):
        past, prefix = self.band(tiles, None, 0), over_tiles(self.prefix)
        return TileStates(
            past.some | (tiles.kv_first < prefix), past.every | (tiles.kv_last < prefix)
        )

    def borders(self, tiles):
        return [*self.ends(tiles, 0), over_tiles(self.prefix)]

    def __repr__(self):
        return f"prefix_lm({show_value(self.prefix)}{self._suffix()})"


@pytree()
class Lengths(Mask):
    q: Any  # int, scalar array, [B] or None
    kv: Any

    def __call__(self, b, h, q_idx, kv_idx):
        visible = jnp.ones((), bool)
        if self.q is not None:
            visible = visible & (q_idx < at_batch(self.q, b))
        if self.kv is not None:
            visible = visible & (kv_idx < at_batch(self.kv, b))
        return visible

    def bind(self, batch, heads, q_len, kv_len):
        del heads, q_len, kv_len
        check_batch(self.q, batch, "lengths: q")
        check_batch(self.kv, batch, "lengths: kv")
        return self

    def varies(self):
        return max(entries(self.q), entries(self.kv)) > 1, False

    def classify(self, tiles):
        some = every = np.ones(tiles.shape, bool)
        if self.q is not None:
            length = over_tiles(self.q)
            some, every = some & (tiles.q_first < length), every & (tiles.q_last < length)
        if self.kv is not None:
            length = over_tiles(self.kv)
            some, every = some & (tiles.kv_first < length), every & (tiles.kv_last < length)
        return TileStates(some, every)

    def borders(self, tiles):
        return [] if self.kv is None else [over_tiles(self.kv)]

    def __repr__(self):
        return f"lengths(q={show_value(self.q)}, kv={show_value(self.kv)})"


@pytree(static=("lengths",))
class Document(Mask):
    q_ids: Any  # int32 [1 or B, Sq]
    kv_ids: Any  # int32 [1 or B, Sk]
    lengths: tuple[int, ...] | None = None  # what the ids were made from, if from that

    def __call__(self, b, h, q_idx, kv_idx):
        q_ids = documents.id_at(self.q_ids, b, q_idx)
        return (q_ids == documents.id_at(self.kv_ids, b, kv_idx)) & (q_ids >= 0)

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
                    f"[{batch}, {length}] or [1, {length}], an id for each token. Where Sq ≠ Sk "
                    "give a tuple (q_ids, kv_ids); for lengths write document(lengths=[…])."
                )
        return self

    def varies(self):
        return max(self.q_ids.shape[0], self.kv_ids.shape[0]) > 1, False

    def classify(self, tiles):
        """By the range of ids in a tile: exact where documents are packed one after another."""
        q_low, q_high, q_single = (
            x[:, None, :, None]
            for x in documents.id_ranges(self.q_ids, tiles.grid.block_q, tiles.q_tiles.reshape(-1))
        )
        b = np.arange(self.kv_ids.shape[0])[:, None, None, None]
        k_low, k_high, k_single = (
            x[b, tiles.kv_tiles] for x in documents.id_ranges(self.kv_ids, tiles.grid.block_kv)
        )
        some = (q_low <= k_high) & (k_low <= q_high)
        return TileStates(some, some & q_single & k_single)

    def borders(self, tiles):
        return documents.borders(self.q_ids, self.kv_ids, tiles)

    def __repr__(self):
        if self.lengths is not None:
            return f"document(lengths={list(self.lengths)})"
        return f"document(ids {list(self.q_ids.shape)}, {list(self.kv_ids.shape)})"
