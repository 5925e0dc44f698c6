"""Tile sizes by chip and shape, such that they fit into VMEM.

`block_sizes.json` holds what `smalti estimate tune ours` found; each entry has its command.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from smalti import block_table
from smalti.attention.block_sizes import BlockSizes
from smalti.attention.tpu.known import Cells, plan_known
from smalti.attention.tpu.launches import Launch
from smalti.attention.tpu.layout import Heads
from smalti.attention.tpu.mods import NO_MOD, KernelMod
from smalti.attention.tpu.pipeline import written_out
from smalti.attention.tpu.tiles import Band, Blocks
from smalti.attention.tpu.vmem import vmem_bytes
from smalti.chips import TENSOR_CORES
from smalti.masks.tiles import TileGrid
from smalti.tpu.lanes import LANES, round_up

MIB = 2**20
# What a kernel may use of a core's VMEM: some stays for the compiler's own and for what XLA keeps
# there around the kernel.
VMEM_LIMIT = {
    "v4": 14 * MIB,
    **dict.fromkeys(("v5e", "v5p", "v6e", "v7x"), 52 * MIB),
}
UNKNOWN_VMEM_LIMIT = 14 * MIB
MOST_OVERESTIMATE = 1.25  # of what a kernel takes
MOST_MAJOR = 8192  # tokens; longer blocks save nothing
SMALL_MAJOR = 1024  # of queries: less is too little work between copies
MOST_MAJOR_WITH_BIAS = 1024  # where a block of the bias is as large as one of scores
Direction = Literal["forward", "backward"]
# The most of a tile: taller and wider ones compile for minutes, and gain at most a few percent.
LARGEST = {"block_q": 512, "block_kv": 1024}
# block_q, block_kv of what the table has no entry for.
DEFAULT = {
    "bfloat16": (512, 1024),
    # Its products take six passes, and what they spill of a larger tile is more than all else.
    "float32": (256, 512),
}
# Of a product's operands one is held by a matrix unit and the rows of the other are streamed
# through it. To load a row takes a third of the time that streaming one does. Where a score tile
# meets an array of D dimensions: held, it costs D + width / 3 a square of width², streamed, width.
MXU_WIDTH = {name: core.mxu_side for name, core in TENSOR_CORES.items()}
UNKNOWN_MXU_WIDTH = 128


def vmem_limit(chip: str | None) -> int:
    """What the kernels are compiled with."""
    return VMEM_LIMIT.get(chip or "", UNKNOWN_VMEM_LIMIT)


def choose(
    direction: Direction,
    *,
    q_len: int,
    kv_len: int,
    heads: Heads,
    itemsize: int,
    chip: str | None,
    block_sizes: BlockSizes | None,
    band: Band | None = None,
    cells: Cells | None = None,
    mask: KernelMod = NO_MOD,
    score_mod: KernelMod = NO_MOD,
    bias: tuple[tuple[int, int], int] | None = None,
) -> Blocks:
    """The blocks of a direction's launches. ``bias``: as for `vmem_bytes`.

    band: of the mask, if it is one. cells: of the mask, if it is known and scores hide no key.

    Major blocks are halved until they fit into VMEM, those of keys last, and then tiles, if they
    were not given.
    """
    if block_sizes is not None:
        check(block_sizes)
        block_q = min(block_sizes.block_q, round_up(q_len))
        block_kv = min(block_sizes.block_kv, round_up(kv_len))
    else:
        dtype = "float32" if itemsize == 4 else "bfloat16"
        sizes = _tuned(direction, dtype, band, chip, heads, q_len, kv_len) or DEFAULT[dtype]
        block_q, block_kv = (
            _fit(size, length) for size, length in zip(sizes, (q_len, kv_len), strict=True)
        )
    width = MXU_WIDTH.get(chip or "", UNKNOWN_MXU_WIDTH)
    streamed = 3 * max(heads.D, heads.Dv) >= 2 * width
    kinds = [x.kind for mod in (mask, score_mod) for x in mod.operands]
    floating = len(score_mod.floating) if score_mod.is_given else None

    def need(blocks: Blocks) -> int:
        all_keys = kv_len <= blocks.major_kv
        walk = plan_known(cells, blocks) if cells is not None and all_keys else None
        written, loops = written_out(walk) if walk else (0, True)
        return max(
            vmem_bytes(
                launch,
                blocks,
                heads,
                itemsize,
                chip=chip,
                operands=operand_blocks(kinds, blocks, q_len, kv_len),
                score_mod=floating,
                relative="relative" in kinds,
                one_tile_per_query=walk is not None and walk.one_tile_per_query,
                first_keys=0 if walk is None else walk.first_keys,
                bias=bias,
                written_out=written,
                loops=loops,
            )
            for launch in _launches(direction, all_keys, bias is not None)
        )

    limit = vmem_limit(chip)
    large = "scores" in kinds or (bias is not None and 1 not in bias[0])
    tiles = _Tiles(block_q, block_kv, streamed, keys_in_lanes=heads.token_axis == 1)
    most = MOST_MAJOR_WITH_BIAS if large else MOST_MAJOR
    for blocks in _candidates(tiles, q_len, kv_len, most, given=block_sizes is not None):
        if need(blocks) <= limit:
            return blocks
    if block_sizes and chip and need(blocks) > MOST_OVERESTIMATE * limit:
        raise ValueError(
            f"block_sizes: a tile of {block_q} queries and {block_kv} keys takes some "
            f"{need(blocks) // MIB} MiB of VMEM, and {chip} has {limit // MIB} for a kernel. "
            "Make them smaller, or leave block_sizes out."
        )
    return blocks


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """What of `Blocks` does not depend on how much of a sequence is in VMEM."""

    block_q: int
    block_kv: int
    streamed: bool
    keys_in_lanes: bool

    def within(self, major_q: int, major_kv: int, key_buffers: int = 2) -> Blocks:
        cut_q = 256 if self.block_q % 256 == 0 else 128
        return Blocks(
            self.block_q, self.block_kv, cut_q, major_q, major_kv, key_buffers, self.streamed,
            self.keys_in_lanes,
        )  # fmt: skip


def _candidates(
    tiles: _Tiles, q_len: int, kv_len: int, most: int, *, given: bool
) -> Iterator[Blocks]:
    """Ever smaller blocks. most: tokens of a major block. given: tiles are not made smaller."""

    def largest(length: int, block: int) -> int:
        return min(round_up(length, block), max(most // block, 1) * block)

    # With all keys at once the list of tiles is known, and one launch does the backward. That is
    # worth fewer queries, no room for the next head's keys, and a smaller tile.
    narrower = dataclasses.replace(tiles, block_kv=round_up(tiles.block_kv // 2))
    smaller = [] if given else [(narrower, 1)]
    for now, key_buffers in [(tiles, 2), (tiles, 1), *smaller]:
        major_q, major_kv = largest(q_len, now.block_q), largest(kv_len, now.block_kv)
        while kv_len <= major_kv:
            yield now.within(major_q, major_kv, key_buffers)
            if major_q <= max(SMALL_MAJOR, now.block_q):
                break
            major_q = round_up(major_q // 2, now.block_q)
    while True:
        block_q, block_kv = tiles.block_q, tiles.block_kv
        major_q, major_kv = largest(q_len, block_q), largest(kv_len, block_kv)
        yield tiles.within(major_q, major_kv)
        while (major_q, major_kv) != (block_q, block_kv):
            if major_kv == block_kv or major_q > max(SMALL_MAJOR, block_q):
                major_q = round_up(major_q // 2, block_q)
            else:
                major_kv = round_up(major_kv // 2, block_kv)
            yield tiles.within(major_q, major_kv)
        if given or block_q == block_kv == LANES:
            return
        if block_kv > block_q:
            tiles = dataclasses.replace(tiles, block_kv=round_up(block_kv // 2))
        else:
            tiles = dataclasses.replace(tiles, block_q=round_up(block_q // 2))


def operand_blocks(kinds, blocks: Blocks, q_len: int, kv_len: int) -> list[tuple[int, int, int]]:
    """Of a mod's operands in VMEM: rows, columns and bytes of an element."""
    lengths = {
        "q": (1, blocks.major_q, 4),
        "kv": (1, blocks.major_kv, 4),
        "relative": (1, round_up(q_len, blocks.major_q) + round_up(kv_len, blocks.major_kv), 4),
        "scores": (blocks.major_q, blocks.major_kv, 2),
    }
    return [lengths[kind] for kind in kinds if kind != "number"]


def name_in_table(band: Band | None) -> str | None:
    """What tables of block sizes call a mask with this band; None where they have no name."""
    if band is None:
        return None
    low, high = band
    if low is None:
        return "full" if high is None else "causal"
    return f"sliding_window({high - low + 1})" if high is not None and low <= high else None


@functools.cache
def table() -> list[block_table.Entry]:
    return block_table.load(Path(__file__).with_name("block_sizes.json"))


def _tuned(
    direction: Direction,
    dtype: str,
    band: Band | None,
    chip: str | None,
    heads: Heads,
    q_len: int,
    kv_len: int,
) -> tuple[int, int] | None:
    mask = name_in_table(band)
    if mask is None or chip is None:
        return None
    shape_class = block_table.attention_class(
        which=direction,
        dtype=dtype,
        mask=mask,
        Hq=heads.Hq,
        Hkv=heads.Hkv,
        Sq=q_len,
        Sk=kv_len,
        D=heads.D,
        Dv=heads.Dv,
    )
    entry = block_table.find(table(), kernel="ours", chip=chip, shape_class=shape_class)
    return None if entry is None else (entry["blocks"]["block_q"], entry["blocks"]["block_kv"])


def _launches(direction: Direction, all_keys: bool, with_bias: bool) -> tuple[Launch, ...]:
    if direction == "forward":
        return ("forward",)
    launches: tuple[Launch, ...] = ("backward",) if all_keys else ("backward_dq", "backward_dk_dv")
    return (*launches, "bias_gradient") if with_bias else launches


def check(block_sizes: BlockSizes) -> None:
    """Raises ValueError for sizes that the kernels cannot take."""
    for name, (size, most, nearest) in _illegal(block_sizes).items():
        raise ValueError(
            f"BlockSizes.{name}: got {size}; the TPU kernels take multiples of {LANES}, the "
            f"lanes of a register, up to {most}. The nearest is {nearest}."
        )


def _illegal(block_sizes: BlockSizes) -> dict[str, tuple[int, int, int]]:
    """Of each size that is, the size, the most and the nearest that is not."""
    found = {}
    for name, most in LARGEST.items():
        size = getattr(block_sizes, name)
        nearest = min(max(round(size / LANES), 1) * LANES, most)
        if size != nearest:
            found[name] = size, most, nearest
    return found


def of_block_mask(grid: TileGrid) -> BlockSizes | None:
    """The tiles of a BlockMask, where they are such as the kernels take; one that is all of a
    sequence is filled up."""
    sizes = BlockSizes(
        grid.block_q if grid.num_q > 1 else round_up(grid.q_len),
        grid.block_kv if grid.num_kv > 1 else round_up(grid.kv_len),
    )
    return None if _illegal(sizes) else sizes


def _fit(block: int, length: int) -> int:
    """The largest multiple of 128 up to ``block`` that pads ``length`` by little: by a fifteenth
    more than the least, which larger tiles are worth."""
    if length <= block:
        return round_up(length)
    sizes = range(LANES, block + 1, LANES)
    least = min(round_up(length, size) for size in sizes)
    return max(size for size in sizes if round_up(length, size) * 15 <= least * 16)
