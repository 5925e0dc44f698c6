"""The walk of a call.

A mask is taken apart into what is known and what is not, of which both must say yes. Where all is
known, its tiles are cut to measure and of few kinds (`known`). Else tiles lie on a grid, those that
the unknown part leaves whole in the classes of the known one, and the rest in the same with the
unknown part evaluated; the lists of tiles may then be traced.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from smalti.attention.block_sizes import BlockSizes
from smalti.attention.tpu.block_sizes import Direction, choose, of_block_mask
from smalti.attention.tpu.known import Cells, Planner, find_cells, plan_known
from smalti.attention.tpu.mods import NO_MOD, KernelMod, Sizes, find_band, split, traced_mask
from smalti.attention.tpu.tiles import Blocks, Part, Parts, TileClass, Walk, held
from smalti.eagerly import eagerly
from smalti.masks import BlockMask, Mask
from smalti.masks.mask_mod import And, TileStates
from smalti.masks.tiles import TileGrid, is_known, reduce_tiles
from smalti.tpu.lanes import LANES

MOST_KNOWN_CLASSES = 3  # beside a rest; each is code of its own, up to three times


@dataclasses.dataclass(frozen=True)
class Divided:
    """A mask as the conjunction of two; None: it hides nothing."""

    known: Cells | None
    rest: Mask | BlockMask | None  # what a kernel evaluates


def divisions(mask: Mask | BlockMask, sizes: Sizes) -> Iterator[Divided]:
    """Ways to divide a mask bound to a call, the best first; `plan` can follow the last of them."""
    whole = mask.mask if isinstance(mask, BlockMask) else mask
    leaves = list(_conjuncts(whole))
    known = [x for x in leaves if is_known(x) and not any(x.varies())]
    tried = None
    for chosen in (lambda: known, lambda: [x for x in known if find_band(x, sizes) is not None]):
        some = chosen()
        if some == tried:
            break
        tried, rest = some, [x for x in leaves if x not in some]
        if not some or (rest and isinstance(mask, BlockMask)):  # its tiles are those of the whole
            continue
        cells = find_cells(functools.reduce(operator.and_, some), sizes)
        if cells is not None:
            yield Divided(cells, functools.reduce(operator.and_, rest) if rest else None)
    yield Divided(None, mask)


def plans_of(
    mask: Mask | BlockMask,
    sizes: Sizes,
    *,
    block_sizes: BlockSizes | None,
    score_mod: KernelMod,
    bias: tuple[tuple[int, int], int] | None,
    **options: Any,
) -> tuple[KernelMod, tuple, tuple[Walk, Walk]]:
    """What a kernel evaluates of a mask bound to a call, its operands, and the walks of the forward
    and the backward. block_sizes, score_mod, bias, options: of `block_sizes.choose`."""
    _, _, q_len, kv_len = sizes
    may_hide = bias is not None or score_mod.is_given
    own = of_block_mask(mask.grid) if isinstance(mask, BlockMask) else None
    whole = mask.mask if isinstance(mask, BlockMask) else mask
    band = find_band(whole, sizes)

    def walk_of(direction: Direction, divided: Divided, evaluated: KernelMod) -> Walk | None:
        blocks = choose(
            direction,
            q_len=q_len,
            kv_len=kv_len,
            block_sizes=own if isinstance(divided.rest, BlockMask) else block_sizes,
            band=band,
            cells=divided.known if divided.rest is None and not may_hide else None,
            mask=evaluated,
            score_mod=score_mod,
            bias=bias,
            **options,
        )
        whole_scores = any(operand.kind == "scores" for operand in evaluated.operands)
        return plan(divided, sizes, blocks, may_hide=may_hide, may_evaluate=not whole_scores)

    for divided in divisions(mask if own else whole, sizes):
        rest = divided.rest.mask if isinstance(divided.rest, BlockMask) else divided.rest
        if rest is None and not may_hide:  # what of a known mask is no band
            rest = whole
        evaluated, operands = NO_MOD, ()
        if rest is not None:
            evaluated, operands = split(traced_mask(rest), sizes, "mask")
        forward = walk_of("forward", divided, evaluated)
        backward = walk_of("backward", divided, evaluated)
        if forward is not None and backward is not None:
            if not any(part.masked for walk in (forward, backward) for part in walk.parts):
                evaluated, operands = NO_MOD, ()
            return evaluated, operands, (forward, backward)
    raise AssertionError("the last division can be followed")


def plan(
    divided: Divided,
    sizes: Sizes,
    blocks: Blocks,
    *,
    may_hide: bool = False,
    may_evaluate: bool = True,
) -> Walk | None:
    """The walk over a mask bound to the call; of a BlockMask that is evaluated ``blocks`` has the
    tiles. None where the known part is of too many kinds.

    may_hide: scores may hide keys, too, so that every tile needs looking at. may_evaluate: whether
    the kernel may be left to evaluate a known mask where it is no band.
    """
    if divided.rest is None and not may_hide:
        assert divided.known is not None
        walk = plan_known(divided.known, blocks)
        if walk is not None and (may_evaluate or not any(part.masked for part in walk.parts)):
            return walk
    return _plan_grid(divided, sizes, blocks, may_hide)


def _conjuncts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.left)
        yield from _conjuncts(mask.right)
    else:
        yield mask


def _plan_grid(divided: Divided, sizes: Sizes, blocks: Blocks, may_hide: bool) -> Walk | None:
    batch, heads, q_len, kv_len = sizes
    grid = TileGrid(batch, heads, q_len, kv_len, blocks.block_q, blocks.block_kv)
    found = _known_classes(divided.known, grid, blocks)
    if found is None:
        return None
    every_class, number, empty_in_bands = found
    number = number[None, None]
    seen = None
    if isinstance(divided.rest, BlockMask):
        states, rest = divided.rest.states(), divided.rest.mask
    elif divided.rest is None:
        rest, states = None, TileStates(np.ones((1, 1, 1, 1), bool), np.ones((1, 1, 1, 1), bool))
    else:
        rest = divided.rest
        states = rest.classify(grid)
    if rest is not None and not may_hide:
        seen = _surely_seen(divided, rest, grid)
    known = all(isinstance(x, np.ndarray) for x in (*states, seen) if x is not None)
    xp: Any = np if known else jnp
    num = len(every_class)
    guarded = True if seen is None else ~seen
    hidden = xp.where(guarded, 2 * num, num)
    state = xp.where(states.every & (not may_hide), 0, hidden) + number
    state = xp.where(states.some & (number < num), state, 3 * num)  # the last: not visited
    entries = state.shape[:2]
    num_q, num_kv = -(-q_len // blocks.major_q), -(-kv_len // blocks.major_kv)
    per_q, per_kv = blocks.major_q // blocks.block_q, blocks.major_kv // blocks.block_kv
    pad = ((0, 0), (0, 0), (0, num_q * per_q - grid.num_q), (0, num_kv * per_kv - grid.num_kv))
    state = xp.pad(state, pad, constant_values=3 * num)
    state = state.reshape(-1, num_q, per_q, num_kv, per_kv).swapaxes(2, 3)
    state = state.reshape(-1, num_q, num_kv, per_q * per_kv)
    order = xp.argsort(state, axis=-1, stable=True)
    tiles = order // per_kv << 16 | order % per_kv * (blocks.block_kv // LANES)
    # A class that no tile is in costs the kernel code.
    kinds = range(2 * num if may_hide else 0, 3 * num)
    kinds = [n for n in kinds if not known or (state == n).any()] or [0]
    counts = xp.stack([(state == kind).sum(-1) for kind in kinds], -1)
    lists = xp.concatenate([counts, tiles], -1).astype(np.int32)
    live = counts.sum(-1) > 0  # [entries, num_q, num_kv]
    lists = lists.reshape(-1, 1, lists.shape[-1])
    return Walk(
        lists=lists,
        **held(live, xp),
        classes=(tuple(TileClass(_parts_of(kind, every_class), None) for kind in kinds),),
        blocks=blocks,
        q_len=q_len,
        kv_len=kv_len,
        entries=entries,
        empty_rows=True,
        empty_in_bands=empty_in_bands,
    )


def _known_classes(
    cells: Cells | None, grid: TileGrid, blocks: Blocks
) -> tuple[list[Parts], np.ndarray, bool] | None:
    """The classes of the known part; of every tile the number of its own, or, of an empty one, how
    many there are; and whether some queries see nothing. None where a kernel would have to evaluate
    it."""
    whole = Part(0, blocks.block_q, 0, blocks.block_kv)
    if cells is None:
        last = grid.kv_len - (grid.num_kv - 1) * blocks.block_kv
        if last == blocks.block_kv:
            return [(whole,)], np.zeros((grid.num_q, grid.num_kv), np.int32), False
        ragged = dataclasses.replace(whole, band=(None, None), seen=(0, last))
        number = np.zeros((grid.num_q, grid.num_kv), np.int32)
        number[:, -1] = 1
        return [(whole,), (ragged,)], number, False
    planner = Planner(cells, blocks, mask_only=False)
    width, height = blocks.block_kv // LANES, blocks.block_q // LANES
    every: dict[Parts, int] = {}
    number = np.zeros((grid.num_q, grid.num_kv), np.int32)
    for i, j in np.ndindex(number.shape):
        rows, columns = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        parts = planner.parts(rows, columns)
        number[i, j] = every.setdefault(parts, len(every)) if parts else -1
        if len(every) > MOST_KNOWN_CLASSES or any(part.masked for part in parts):
            return None
    return list(every), np.where(number < 0, len(every), number), cells.empty_rows


def _parts_of(kind: int, every: list[Parts]) -> Parts:
    """What a tile of a kind computes: a known class as it is, with the rest of the mask evaluated,
    or with keys looked for that nobody sees, too."""
    how, number = divmod(kind, max(len(every), 1))
    parts = every[number] if every else ()
    return tuple(dataclasses.replace(x, masked=how > 0, guarded=how > 1) for x in parts)


def _surely_seen(divided: Divided, mask: Mask, grid: TileGrid):
    """Bool ``[1 or B, 1 or Hq, 1, num_kv]``: whether every key of a column of tiles is seen, as far
    as one look at each key tells: by the query that meets it where the last meets the last."""
    key = np.arange(grid.kv_len, dtype=np.int32)
    query = np.clip(key - (grid.kv_len - grid.q_len), 0, grid.q_len - 1)
    b, h = (np.arange(n if varies else 1, dtype=np.int32) for n, varies in
            zip((grid.batch, grid.heads), mask.varies(), strict=True))  # fmt: skip
    indices = b[:, None, None], h[None, :, None], query[None, None], key[None, None]
    seen = eagerly(mask, *indices) if is_known(mask) else mask(*indices)
    xp: Any = np if isinstance(seen, np.ndarray) else jnp
    seen = xp.broadcast_to(seen, (len(b), len(h), grid.kv_len))
    if divided.known is not None:
        seen = seen & divided.known.sees(query, key)[None, None]
    return reduce_tiles(seen[:, :, None], 1, grid.block_kv, every=True)
