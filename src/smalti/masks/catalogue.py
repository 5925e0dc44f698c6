"""The masks that people train and serve with, each in its plain formula and in closed form by tile.

``q_idx`` and ``kv_idx`` count from 0. In the causal masks the query's position among the keys is
``i = q_idx + offset``; ``offset`` defaults to ``Sk − Sq`` at the call, so that the last query meets
the last key. An offset may be an int, a traced scalar, or an int32 array ``[B]``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smalti.masks.mask_mod import Mask, TileStates, pytree
from smalti.masks.tiles import as_known


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
    return Causal(_offset(offset, "causal"))


@_factory
def sliding_window(window: int, offset=None) -> Mask:
    """Exactly ``window`` keys, the query's own last: ``max(0, i − window + 1) ≤ j ≤ i``."""
    return SlidingWindow(
        _offset(offset, "sliding_window"), _size(window, "sliding_window: window", 1)
    )


@_factory
def local(left: int, right: int, offset=0) -> Mask:
    """``left`` keys before the query and ``right`` after it: ``i − left ≤ j ≤ i + right``; either
    may be negative.

    Not a causal mask: ``offset`` is 0 unless given.
    """
    left, right = _size(left, "local: left"), _size(right, "local: right")
    return Local(_offset(offset, "local"), left, right)


@_factory
def streaming(*, sinks: int, window: int, offset=None) -> Mask:
    """StreamingLLM (arXiv:2309.17453): ``j < sinks`` or ``max(sinks, i − window + 1) ≤ j``, and
    ``j ≤ i``: the first ``sinks`` tokens and the last ``window``."""
    return Streaming(
        _offset(offset, "streaming"),
        _size(sinks, "streaming: sinks", 0),
        _size(window, "streaming: window", 1),
    )


@_factory
def prefix_lm(prefix, offset=None) -> Mask:
    """Everybody sees the first ``prefix`` keys, the rest is causal: ``j < prefix`` or ``j ≤ i``.

    ``prefix``: an int, a traced scalar, or an int32 array ``[B]``.
    """
    return PrefixLM(_offset(offset, "prefix_lm"), _per_batch(prefix, "prefix_lm: prefix"))


@_factory
def document(ids) -> Mask:
    """A query sees the keys of its own document; negative ids are padding that nobody sees.

    ``ids``: int32 ``[S]`` or ``[B, S]``, or a tuple ``(q_ids, kv_ids)`` of lengths Sq and Sk.
    """
    q_ids, kv_ids = ids if isinstance(ids, tuple) and len(ids) == 2 else (ids, ids)
    return Document(_ids(q_ids), _ids(kv_ids))


@_factory
def lengths(*, q=None, kv=None) -> Mask:
    """Only the first ``q`` queries and ``kv`` keys are real; each an int, a traced scalar or
    int32 ``[B]``, or None for all of them."""
    if q is None and kv is None:
        raise ValueError("lengths: give q=, kv= or both; with neither, use full().")
    return Lengths(
        None if q is None else _per_batch(q, "lengths: q"),
        None if kv is None else _per_batch(kv, "lengths: kv"),
    )


@pytree()
class Full(Mask):
    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.ones(jnp.broadcast_shapes(jnp.shape(q_idx), jnp.shape(kv_idx)), bool)

    def classify(self, tiles):
        yes = np.ones((1, 1, tiles.num_q, tiles.num_kv), bool)
        return TileStates(yes, yes)

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
        _check_batch(self.offset, batch, f"{self!r}: offset")
        return self

    def varies(self):
        return _length(self.offset) > 1, False

    def position(self, b, q_idx):
        if self.offset is None:
            raise ValueError(
                f"{self!r}: its offset is Sk − Sq of the call and not known outside one; "
                "give offset= to use the mask by itself."
            )
        return q_idx + _at(self.offset, b)

    def band(self, tiles, left, right) -> TileStates:
        """``i − left ≤ j ≤ i + right`` by tile, exactly; None is no bound."""
        offset = _over_tiles(self.offset)
        first, last = tiles.q_first + offset, tiles.q_last + offset  # positions of the tile's rows
        some = every = np.ones((1, 1, tiles.num_q, tiles.num_kv), bool)
        if right is not None:
            some = some & (tiles.kv_first <= last + right)
            every = every & (tiles.kv_last <= first + right)
        if left is not None:
            some = some & (tiles.kv_last >= first - left)
            every = every & (tiles.kv_first >= last - left)
        return TileStates(some, every)

    def _suffix(self) -> str:
        return "" if self.offset is None else f", offset={_show(self.offset)}"


@pytree()
class Causal(_Offset):
    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= self.position(b, q_idx)

    def classify(self, tiles):
        return self.band(tiles, None, 0)

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
        no_gap = tiles.q_last + _over_tiles(self.offset) - self.window < self.sinks
        return TileStates(
            (past.some & sink_some) | recent.some,
            (past.every & (sink_every | no_gap)) | recent.every,
        )

    def __repr__(self):
        return f"streaming(sinks={self.sinks}, window={self.window}{self._suffix()})"


@pytree()
class PrefixLM(_Offset):
    prefix: Any  # int, scalar array or [B]

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx < _at(self.prefix, b)) | (kv_idx <= self.position(b, q_idx))

    def bind(self, batch, heads, q_len, kv_len):
        _check_batch(self.prefix, batch, "prefix_lm: prefix")
        return super().bind(batch, heads, q_len, kv_len)

    def varies(self):
        return max(_length(self.offset), _length(self.prefix)) > 1, False

    def classify(self, tiles):
        past, prefix = self.band(tiles, None, 0), _over_tiles(self.prefix)
        return TileStates(
            past.some | (tiles.kv_first < prefix), past.every | (tiles.kv_last < prefix)
        )

    def __repr__(self):
        return f"prefix_lm({_show(self.prefix)}{self._suffix()})"


@pytree()
class Lengths(Mask):
    q: Any  # int, scalar array, [B] or None
    kv: Any

    def __call__(self, b, h, q_idx, kv_idx):
        visible = jnp.ones((), bool)
        if self.q is not None:
            visible = visible & (q_idx < _at(self.q, b))
        if self.kv is not None:
            visible = visible & (kv_idx < _at(self.kv, b))
        return visible

    def bind(self, batch, heads, q_len, kv_len):
        del heads, q_len, kv_len
        _check_batch(self.q, batch, "lengths: q")
        _check_batch(self.kv, batch, "lengths: kv")
        return self

    def varies(self):
        return max(_length(self.q), _length(self.kv)) > 1, False

    def classify(self, tiles):
        some = every = np.ones((1, 1, tiles.num_q, tiles.num_kv), bool)
        if self.q is not None:
            length = _over_tiles(self.q)
            some, every = some & (tiles.q_first < length), every & (tiles.q_last < length)
        if self.kv is not None:
            length = _over_tiles(self.kv)
            some, every = some & (tiles.kv_first < length), every & (tiles.kv_last < length)
        return TileStates(some, every)

    def __repr__(self):
        return f"lengths(q={_show(self.q)}, kv={_show(self.kv)})"


@pytree()
class Document(Mask):
    q_ids: Any  # int32 [1 or B, Sq]
    kv_ids: Any  # int32 [1 or B, Sk]

    def __call__(self, b, h, q_idx, kv_idx):
        q_ids, kv_ids = _id_at(self.q_ids, b, q_idx), _id_at(self.kv_ids, b, kv_idx)
        return (q_ids == kv_ids) & (q_ids >= 0)

    def bind(self, batch, heads, q_len, kv_len):
        del heads
        for side, ids, length in (("q", self.q_ids, q_len), ("kv", self.kv_ids, kv_len)):
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
            x[:, None, :, None] for x in _id_range(self.q_ids, tiles.block_q)
        )
        k_low, k_high, k_single = (
            x[:, None, None, :] for x in _id_range(self.kv_ids, tiles.block_kv)
        )
        some = (q_low <= k_high) & (k_low <= q_high)
        return TileStates(some, some & q_single & k_single)

    def __repr__(self):
        return f"document(ids {list(self.q_ids.shape)}, {list(self.kv_ids.shape)})"


# What the constructors accept.


# More tokens than any sequence has. Larger sizes and offsets mean the same as this, and sums of
# three of them stay within int32.
MANY = 2**29


def _size(value, name: str, least: int | None = None) -> int:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or (least is not None and value < least):
        allowed = "an int" if least is None else f"an int of at least {least}"
        raise ValueError(f"{name}: got {value!r}; it must be {allowed}.")
    return max(-MANY, min(int(value), MANY))


def _integers(value, name: str, ndim: int):
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


def _offset(offset, name: str):
    return None if offset is None else _per_batch(offset, f"{name}: offset")


def _per_batch(value, name: str):
    """Positions or lengths; beyond `MANY` they are as good as `MANY`."""
    value = _integers(value, name, 1)
    if isinstance(value, int):
        return max(-MANY, min(value, MANY))
    return value.clip(-MANY, MANY).astype(np.int32)


def _ids(ids):
    ids = _integers(ids, "document: ids", 2)
    if isinstance(ids, int) or ids.ndim == 0:
        raise ValueError("document: ids are one number; give one id per token, [S] or [B, S].")
    known, limits = as_known(ids), np.iinfo(np.int32)
    if isinstance(known, np.ndarray) and (known.min() < limits.min or known.max() > limits.max):
        raise ValueError(
            f"document: ids run from {known.min()} to {known.max()}; they must fit int32. "
            "Number the documents from 0."
        )
    return ids.astype(np.int32).reshape((1, -1) if ids.ndim == 1 else ids.shape)


# A value that is an int, a scalar array, or [B].


def _length(value) -> int:
    """B for ``[B]``, else 1."""
    shape = np.shape(value) if value is not None else ()
    return shape[0] if shape else 1


def _check_batch(value, batch: int, name: str):
    if _length(value) not in (1, batch):
        raise ValueError(
            f"{name} has {_length(value)} entries; it must be one number or one for each of the "
            f"{batch} batch entries."
        )


def _at(value, b):
    """The value for batch entry b."""
    if not np.shape(value):
        return value
    return jnp.asarray(value)[b if _length(value) > 1 else 0]


def _over_tiles(value):
    """The value as ``[1 or B, 1, 1, 1]``, NumPy where known."""
    value = as_known(value)
    return value.reshape(-1, 1, 1, 1).astype(np.int32)


def _show(value) -> str:
    return str(value) if value is None or isinstance(value, int) else f"array{list(value.shape)}"


def _id_at(ids, b, index):
    return jnp.asarray(ids)[b if ids.shape[0] > 1 else 0, index]


def _id_range(ids, block: int):
    """Per tile the least and greatest visible id, and whether it holds just one id, unpadded.

    ``[1 or B, n]`` each. A tile without a visible id has least > greatest.
    """
    ids = as_known(ids)
    xp = np if isinstance(ids, np.ndarray) else jnp
    # A ragged last tile repeats the last id: that changes neither range nor padding.
    tiles = xp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    tiles = tiles.reshape(ids.shape[0], -1, block)
    least, high = tiles.min(-1), tiles.max(-1)
    low = xp.where(tiles < 0, np.iinfo(np.int32).max, tiles).min(-1)
    return low, high, (least >= 0) & (low == high)
