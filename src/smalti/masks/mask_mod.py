"""What a mask is: an elementwise predicate that also knows which tiles it leaves empty or whole.

A mask answers four questions:

* ``mask(b, h, q_idx, kv_idx)``: may this query see this key? Elementwise over broadcast indices.
* ``mask.classify(tiles)``: which tiles hold *some* visible pair, and which hold *every* pair?
* ``mask.borders(tiles)``: at which keys may a tile's state differ from that of the tile before?
* ``mask.varies()``: do the answers depend on the batch entry, or on the query head?

Classification is three-valued (Kleene) logic and errs on one side only: ``some=False`` means surely
empty, ``every=True`` surely whole, anything else is a cut tile whose elements must be looked at.
That makes ``&``, ``|`` and ``~`` of masks a closed form of their parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from smalti.eagerly import eagerly
from smalti.masks.tiles import TileGrid, TileIndex, Tiles, as_known, reduce_tiles
from smalti.masks.traced_mod import TracedMod, trace_mod

MaskModFunction = Callable[[Any, Any, Any, Any], Any]
EMPTY, CUT, WHOLE = 0, 1, 2  # a tile's state as one number


class TileStates(NamedTuple):
    """Per tile, ``[B or 1, H or 1, rows, tiles]`` booleans; NumPy where known at trace time."""

    some: Any  # False: no visible pair (surely empty)
    every: Any  # True: every pair visible (surely whole)


class Mask:
    """Base of all masks. Combine with ``&``, ``|``, ``~``. Masks are pytrees of their arrays."""

    __array_ufunc__ = None  # `array & mask` is ours, not NumPy's element by element

    def __call__(self, b, h, q_idx, kv_idx):
        """Whether query ``q_idx`` sees key ``kv_idx`` in batch entry ``b`` and query head ``h``.

        All four are int32 arrays (or ints) that broadcast together; the result is boolean of their
        broadcast shape, or of a shape that broadcasts to it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say which pairs are visible.")

    def bind(self, batch: int, heads: int, q_len: int, kv_len: int) -> Mask:
        """This mask for a call of these sizes: shapes checked, default offsets filled in."""
        del batch, heads, q_len, kv_len
        return self

    def classify(self, tiles: Tiles) -> TileStates:
        """Which tiles are surely empty and surely whole. The mask must be bound."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be classified; bind it to the sizes of a call first."
        )

    def borders(self, tiles: Tiles) -> list | None:
        """Keys, in tokens, at which a row of tiles may change its state: int32 arrays
        ``[1 or B, 1 or H, 1 or rows, n]``. A key too many does no harm, and may lie outside.

        Tiles are then classified beside them only. None: any tile may differ from its neighbour;
        ``classify`` is asked about whole rows, with all of their tiles in order.
        """
        del tiles
        return None

    def varies(self) -> tuple[bool, bool]:
        """Whether the mask depends on (batch entry, query head)."""
        return False, False

    def tile(self, index: TileIndex):
        """The mask over one tile, bool ``[B or 1, H or 1, block_q, width]``."""
        b, h = index.b[:, None, None, None], index.h[None, :, None, None]
        q_idx, kv_idx = index.q_idx[None, None, :, None], index.kv_idx[None, None, None, :]
        visible = jnp.asarray(self(b, h, q_idx, kv_idx), bool)
        visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)
        return jnp.broadcast_to(visible, (*visible.shape[:2], index.block_q, index.num_kv))

    def pad_to(self, q_len: int, kv_len: int) -> Mask:
        """This mask with its ``[…, Sq, Sk]`` arrays padded, so that every tile can be sliced."""
        is_array = lambda x: isinstance(x, ArrayMask)  # noqa: E731
        pad = lambda x: x.padded(q_len, kv_len) if is_array(x) else x  # noqa: E731
        return jax.tree.map(pad, self, is_leaf=is_array)

    def __and__(self, other) -> Mask:
        return And(self, as_mask(other))

    def __rand__(self, other) -> Mask:
        return And(as_mask(other), self)

    def __or__(self, other) -> Mask:
        return Or(self, as_mask(other))

    def __ror__(self, other) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self):
        raise TypeError(
            "a mask has no truth value: Python's `and`, `or` and `not` cannot combine masks and "
            "would silently drop one. Use `&`, `|` and `~`, e.g. `causal() & document(ids)`."
        )


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(*, static: tuple[str, ...] = ()):
    """Class decorator: a frozen dataclass whose fields are pytree children except ``static``."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        return jax.tree_util.register_dataclass(
            cls, data_fields=[n for n in names if n not in static], meta_fields=list(static)
        )

    return register


@pytree()
class And(Mask):
    """Visible where both masks say so."""

    left: Mask
    right: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) & self.right(b, h, q_idx, kv_idx)

    def bind(self, batch, heads, q_len, kv_len):
        sizes = (batch, heads, q_len, kv_len)
        return And(self.left.bind(*sizes), self.right.bind(*sizes))

    def classify(self, tiles):
        left, right = self.left.classify(tiles), self.right.classify(tiles)
        return TileStates(left.some & right.some, left.every & right.every)

    def borders(self, tiles):
        return _borders_of_both(self.left, self.right, tiles)

    def varies(self):
        return _either(self.left.varies(), self.right.varies())

    def tile(self, index):
        return self.left.tile(index) & self.right.tile(index)

    def __repr__(self):
        return f"({self.left!r} & {self.right!r})"


@pytree()
class Or(Mask):
    """Visible where either mask says so."""

    left: Mask
    right: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) | self.right(b, h, q_idx, kv_idx)

    def bind(self, batch, heads, q_len, kv_len):
        sizes = (batch, heads, q_len, kv_len)
        return Or(self.left.bind(*sizes), self.right.bind(*sizes))

    def classify(self, tiles):
        left, right = self.left.classify(tiles), self.right.classify(tiles)
        return TileStates(left.some | right.some, left.every | right.every)

    def borders(self, tiles):
        return _borders_of_both(self.left, self.right, tiles)

    def varies(self):
        return _either(self.left.varies(), self.right.varies())

    def tile(self, index):
        return self.left.tile(index) | self.right.tile(index)

    def __repr__(self):
        return f"({self.left!r} | {self.right!r})"


@pytree()
class Not(Mask):
    """Visible where the mask says no."""

    inner: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return ~jnp.asarray(self.inner(b, h, q_idx, kv_idx), bool)

    def bind(self, batch, heads, q_len, kv_len):
        return Not(self.inner.bind(batch, heads, q_len, kv_len))

    def classify(self, tiles):
        inner = self.inner.classify(tiles)
        return TileStates(~inner.every, ~inner.some)

    def borders(self, tiles):
        return self.inner.borders(tiles)

    def varies(self):
        return self.inner.varies()

    def tile(self, index):
        return ~self.inner.tile(index)

    def __repr__(self):
        return f"~{self.inner!r}"


@pytree(static=("function",))
class MaskMod(Mask):
    """A user's ``mask_mod(b, h, q_idx, kv_idx)``, called with four int32 scalars under tracing."""

    function: MaskModFunction

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.asarray(self.function(b, h, q_idx, kv_idx), bool)

    def bind(self, batch, heads, q_len, kv_len):
        del batch, heads, q_len, kv_len
        index = jax.ShapeDtypeStruct((), jnp.int32)
        mod = trace_mod(self.function, (index,) * 4, name="mask_mod", result=bool)
        return BoundMaskMod(mod)

    def __repr__(self):
        return f"mask_mod({getattr(self.function, '__name__', self.function)!s})"


@pytree()
class BoundMaskMod(Mask):
    """A traced ``mask_mod``: its captured arrays are explicit, its dependence on b and h known."""

    mod: TracedMod

    def __call__(self, b, h, q_idx, kv_idx):
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in (b, h, q_idx, kv_idx)))
        if shape == ():  # as it was written, for those who read the program
            return self.mod.call(b, h, q_idx, kv_idx)
        flat = [jnp.broadcast_to(x, shape).reshape(-1) for x in (b, h, q_idx, kv_idx)]
        return jax.vmap(self.mod.call)(*flat).reshape(shape)

    def varies(self):
        return self.mod.depends[0], self.mod.depends[1]

    def tile(self, index):
        # An index that the function does not read keeps length 1, so a mask shared by all batch
        # entries is computed once.
        b = index.b if self.mod.depends[0] else index.b[:1]
        h = index.h if self.mod.depends[1] else index.h[:1]
        return self.mod.over_tile(b, h, index.q_idx, index.kv_idx)

    def classify(self, tiles):
        rows = tiles.q_tiles.reshape(-1)
        if not self.mod.is_known:
            return TileStates(*_look(self.mod, rows, tiles.grid))
        return TileStates(*eagerly(_look_jitted, self.mod, rows, tiles.grid))

    def __repr__(self):
        return "mask_mod(a function)"


PAIRS_TOGETHER = 1 << 22  # that are evaluated at once: bytes, if the compiler keeps them at all


def _look(mod: TracedMod, q_tiles: Any, grid: TileGrid):
    """`some` and `every` of rows of tiles by evaluating each pair, a few tiles at a time."""
    b = jnp.arange(grid.batch if mod.depends[0] else 1, dtype=jnp.int32)
    h = jnp.arange(grid.heads if mod.depends[1] else 1, dtype=jnp.int32)
    pairs = b.size * h.size * grid.block_q * grid.block_kv
    n = min(max(PAIRS_TOGETHER // pairs, 1), grid.num_kv)
    steps = -(-grid.num_kv // n)

    def part(place):
        q_tile, first = place
        # Past the end the last token is repeated, which changes neither answer.
        q_idx = q_tile * grid.block_q + jnp.arange(grid.block_q, dtype=jnp.int32)
        kv_idx = first * n * grid.block_kv + jnp.arange(n * grid.block_kv, dtype=jnp.int32)
        q_idx, kv_idx = jnp.minimum(q_idx, grid.q_len - 1), jnp.minimum(kv_idx, grid.kv_len - 1)
        visible = mod.over_tile(b, h, q_idx, kv_idx)
        visible = visible.reshape(*visible.shape[:3], n, grid.block_kv)
        return visible.any((2, 4)), visible.all((2, 4))  # [B or 1, H or 1, n]

    places = jnp.meshgrid(jnp.asarray(q_tiles), jnp.arange(steps, dtype=jnp.int32), indexing="ij")
    found = jax.lax.map(part, tuple(x.reshape(-1) for x in places))
    shape = (len(q_tiles), steps, b.size, h.size, n)
    return tuple(
        jnp.transpose(x.reshape(shape), (2, 3, 0, 1, 4)).reshape(
            b.size, h.size, len(q_tiles), steps * n
        )[..., : grid.num_kv]
        for x in found
    )


_look_jitted = jax.jit(_look, static_argnames="grid")


@pytree()
class ArrayMask(Mask):
    """A boolean array that broadcasts to ``[B, Hq, Sq, Sk]``; True where the query sees the key."""

    array: Any  # bool [B or 1, Hq or 1, Sq or 1, Sk or 1]

    def __call__(self, b, h, q_idx, kv_idx):
        pick = [
            i if n > 1 else 0 for i, n in zip((b, h, q_idx, kv_idx), self.array.shape, strict=True)
        ]
        return jnp.asarray(self.array)[tuple(pick)]

    def bind(self, batch, heads, q_len, kv_len):
        sizes = (batch, heads, q_len, kv_len)
        if any(n not in (1, size) for n, size in zip(self.array.shape, sizes, strict=True)):
            raise ValueError(
                f"mask: the boolean array has shape {self.array.shape}, which does not fit "
                f"[B, Hq, Sq, Sk] = {list(sizes)}. Each dimension must be that size or 1."
            )
        return self

    def padded(self, q_len: int, kv_len: int) -> ArrayMask:
        more = [
            n - size if size > 1 else 0
            for n, size in zip((q_len, kv_len), self.array.shape[2:], strict=True)
        ]
        if not any(more):
            return self
        return ArrayMask(jnp.pad(self.array, [(0, 0), (0, 0), (0, more[0]), (0, more[1])]))

    def varies(self):
        return self.array.shape[0] > 1, self.array.shape[1] > 1

    def tile(self, index):
        sliced = index.slice(self.array)
        return jnp.broadcast_to(sliced, (*sliced.shape[:2], index.block_q, index.num_kv))

    def classify(self, tiles):
        grid, array = tiles.grid, as_known(self.array)
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        rows = tiles.q_tiles.reshape(-1, 1) * grid.block_q + np.arange(grid.block_q, dtype=np.int32)
        # The last token again, where a ragged tile has none: that changes neither answer.
        rows = np.minimum(rows, grid.q_len - 1).reshape(-1)
        array = array if array.shape[2] == 1 else array[:, :, rows]
        array = xp.broadcast_to(array, (*array.shape[:2], rows.size, grid.kv_len))
        some = reduce_tiles(array, grid.block_q, grid.block_kv, every=False)
        every = reduce_tiles(array, grid.block_q, grid.block_kv, every=True)
        return TileStates(some, every)

    def __repr__(self):
        return f"array{list(self.array.shape)}"


def as_mask(mask) -> Mask:
    """``mask`` as a `Mask`: itself, a boolean array of up to four dimensions, or a ``mask_mod``."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, (jax.Array, np.ndarray)):
        if mask.dtype != bool:
            raise ValueError(
                f"mask: got an array of dtype {mask.dtype}; a mask array is boolean, True where "
                "the query may see the key. Pass additive masks as bias=."
            )
        if mask.ndim > 4:
            raise ValueError(
                f"mask: got {mask.ndim} dimensions; at most 4, broadcasting to [B, Hq, Sq, Sk]."
            )
        return ArrayMask(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
    if getattr(mask, "is_block_mask", False):
        raise ValueError(
            f"mask: {mask!r} cannot be combined or built again: its tiles are those of one mask. "
            "Combine the masks with `&`, `|` and `~` first, then call build_block_mask."
        )
    if getattr(mask, "is_mask_factory", False):
        raise ValueError(
            f"mask: got the function {mask.__name__} itself; call it: "
            f"mask=smalti.masks.{mask.__name__}(…)."
        )
    if callable(mask):
        return MaskMod(mask)
    raise ValueError(
        f"mask: got {mask!r} of type {type(mask).__name__}; allowed are a mask of smalti.masks, a "
        "BlockMask, a function mask_mod(b, h, q_idx, kv_idx) or a boolean array. "
        "A mask written as text goes through smalti.masks.parse(…)."
    )


def _either(left: tuple[bool, bool], right: tuple[bool, bool]) -> tuple[bool, bool]:
    return left[0] or right[0], left[1] or right[1]


def _borders_of_both(left: Mask, right: Mask, tiles: Tiles) -> list | None:
    first, second = left.borders(tiles), right.borders(tiles)
    return None if first is None or second is None else [*first, *second]
