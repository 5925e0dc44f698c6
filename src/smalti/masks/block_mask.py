"""A mask and the tiles that it leaves alive: for each query tile, runs of key tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, overload

import jax
import numpy as np

from smalti.masks.arguments import MANY
from smalti.masks.mask_mod import Mask, TileStates, as_mask
from smalti.masks.runs import TileRuns, find_runs, runs_to_states, transpose
from smalti.masks.tiles import TileGrid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask and the tiles that it leaves alive, for one shape and one tile size.

    Use it as ``mask=`` of `smalti.attention`; at other lengths than its own it raises, with
    ``block_sizes`` other than its own too, and, where the mask depends on them, at another batch
    size or number of heads. Without ``block_sizes`` attention may compute in other tiles than
    these, joined or split, or cut anew of a known mask. Made by `build_block_mask`.
    """

    is_block_mask = True
    __array_ufunc__ = None  # `array & block_mask` is refused here, not by NumPy

    mask: Mask  # bound to the sizes below
    q_runs: TileRuns  # per query tile, runs of key tiles
    kv_runs: TileRuns  # the transpose: per key tile, runs of query tiles
    grid: TileGrid = dataclasses.field(metadata={"static": True})

    def states(self) -> TileStates:
        """Per tile, whether it is alive and whether it is whole: ``[1 or B, 1 or H, nq, nk]``.

        Dense, so for short sequences; runs say the same.
        """
        return runs_to_states(self.q_runs, self.grid.num_kv)

    def __bool__(self):
        raise TypeError(
            "a BlockMask has no truth value: `and`, `or` and `not` cannot combine masks. Combine "
            "them with `&`, `|` and `~` first, then call build_block_mask."
        )

    def _not_combined(self, *_):
        as_mask(self)  # raises, and says what to combine instead

    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _not_combined

    def __repr__(self):
        grid = self.grid
        return (
            f"BlockMask({self.mask!r}, q_len={grid.q_len}, kv_len={grid.kv_len}, "
            f"block_q={grid.block_q}, block_kv={grid.block_kv})"
        )


@overload
def build_block_mask(
    mask_mod: Any, batch: int, heads: int, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> BlockMask: ...


@overload
def build_block_mask(
    mask_mod: Any, batch: int, heads: int, seqlen: int, block_q: int, block_k: int
) -> BlockMask: ...


def build_block_mask(mask_mod: Any, batch: int, heads: int, *sizes: int, **named: int) -> BlockMask:
    """``build_block_mask(mask_mod, batch, heads, q_len, kv_len, block_q, block_kv)`` finds the live
    tiles of a mask; so does ``build_block_mask(mask_mod, batch, heads, seqlen, block_q, block_k)``
    where queries and keys are as many.

    Args:
      mask_mod: a function ``mask_mod(b, h, q_idx, kv_idx)``, a mask of `smalti.masks`, or a boolean
        array that broadcasts to ``[batch, heads, q_len, kv_len]``.
      batch, heads: sizes of the call; ``heads`` counts query heads. Tiles are found once for all
        entries where the mask does not depend on them.
      q_len, kv_len: tokens; or seqlen, both of them.
      block_q, block_kv: tile size in tokens, cut down to the lengths, which need not be multiples.
        ``block_k`` is another name of ``block_kv``.

    Catalogue masks and their combinations are classified in closed form, beside their borders
    only, with memory in proportion to the runs of live tiles; so is a ``document`` whose ids
    ascend. A general ``mask_mod`` is evaluated pair by pair, under ``jit``, a few tiles at a time.

    Arrays that the mask holds or captures may be traced: runs are traced then, as many a row as it
    could have, and another value needs no other program.

    Raises:
      TypeError: a size missing, unknown or given twice.
      ValueError: a size below 1, or a mask that does not fit the sizes.
    """
    found = _sizes(sizes, named)
    for name, value in (("batch", batch), ("heads", heads), *found):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name}: got {value!r}; it must be an int of at least 1.")
        if value > MANY:
            raise ValueError(f"{name}: got {value!r}; it must be at most {MANY}.")
    q_len, kv_len, block_q, block_kv = (int(value) for _, value in found)
    block_q, block_kv = min(block_q, q_len), min(block_kv, kv_len)
    grid = TileGrid(int(batch), int(heads), q_len, kv_len, block_q, block_kv)
    mask = as_mask(mask_mod).bind(batch, heads, q_len, kv_len)
    runs = find_runs(mask, grid)
    return BlockMask(mask, runs, transpose(runs, grid.num_kv), grid)


_FORMS = (
    "Write build_block_mask(mask_mod, batch, heads, q_len, kv_len, block_q, block_kv), or "
    "(mask_mod, batch, heads, seqlen, block_q, block_k) where both lengths are the same."
)
# What so many sizes after `heads` are.
_ORDERS = {
    0: (),
    1: ("seqlen",),
    2: ("q_len", "kv_len"),
    3: ("seqlen", "block_q", "block_k"),
    4: ("q_len", "kv_len", "block_q", "block_kv"),
}


def _sizes(sizes: tuple, named: dict[str, Any]) -> list[tuple[str, Any]]:
    """q_len, kv_len, block_q and block_kv of either form of the call, under the names it has."""
    if len(sizes) not in _ORDERS:
        raise TypeError(f"build_block_mask: got {len(sizes)} sizes after heads. {_FORMS}")
    given = dict(zip(_ORDERS[len(sizes)], sizes, strict=True))
    known = {name for order in _ORDERS.values() for name in order}
    for name, value in named.items():
        if name not in known:
            raise TypeError(f"build_block_mask: got an unknown argument {name!r}. {_FORMS}")
        if name in given:
            raise TypeError(f"build_block_mask: got {name} twice. {_FORMS}")
        given[name] = value
    for one, same in (("seqlen", "q_len"), ("seqlen", "kv_len"), ("block_k", "block_kv")):
        if one in given and same in given:
            raise TypeError(f"build_block_mask: got both {one} and {same}. {_FORMS}")
    lengths = ("seqlen", "seqlen") if "seqlen" in given else ("q_len", "kv_len")
    names = (*lengths, "block_q", "block_k" if "block_k" in given else "block_kv")
    missing = [name for name in names if name not in given]
    if missing:
        raise TypeError(f"build_block_mask: {' and '.join(missing)} missing. {_FORMS}")
    return [(name, given[name]) for name in names]
