"""What the kernels need of VMEM, as the compiler counts it: blocks, scratch and spilled registers.

Blocks and scratch follow from shapes. A score tile is far larger than the registers, so that the
compiler puts parts of it away; how much is its own affair and was measured
(`tests/attention/tpu/test_compile.py` holds the estimate to what it says).
"""

from __future__ import annotations

from collections.abc import Sequence

from smalti.attention.tpu.launches import MAKES, Launch
from smalti.attention.tpu.layout import Heads
from smalti.attention.tpu.tiles import Blocks
from smalti.tpu.lanes import SUBLANES, round_up

# What loops put away, in sizes of a tile in float32, by how the tiles meet the matrix units.
# Products of float32 take three bfloat16 pieces of each operand.
SPILLED = {
    ("forward", "held"): 2.6,
    ("forward", "streamed"): 2.2,
    ("forward", "float32"): 9.9,
    ("backward", "held"): 2.9,
    ("backward", "streamed"): 3.8,
    ("backward", "float32"): 12.2,
}
MOST_OF_FLOAT32 = {"forward": 5 * 2**20, "backward": 7.5 * 2**20}  # however large the tile
MORE_ON_V4 = 128 * 2**10  # in the forward


def vmem_bytes(
    launch: Launch,
    blocks: Blocks,
    heads: Heads,
    itemsize: int,
    *,
    chip: str | None,
    operands: Sequence[tuple[int, int, int]] = (),
    score_mod: int | None = None,
    relative: bool = False,
    one_tile_per_query: bool = False,
    first_keys: int = 0,
    bias: tuple[tuple[int, int], int] | None = None,
    written_out: int = 0,
    loops: bool = True,
) -> int:
    """What a launch needs at most.

    operands: `block_sizes.operand_blocks`. score_mod: how many arrays with gradients one reads.
    relative: whether any of them is. one_tile_per_query: as `Walk` has it. first_keys: rows that a
    tile has for them. bias: its last two sizes, and its itemsize. written_out, loops:
    `pipeline.written_out`.
    """
    q, kv = blocks.major_q, blocks.major_kv
    queries, outs, keys, values = (
        _padded(heads.block(length, dim), itemsize)
        for length, dim in ((q, heads.D), (q, heads.Dv), (kv, heads.D), (kv, heads.Dv))
    )
    windows = queries + outs
    read = sum(_padded((rows, columns), size) for rows, columns, size in operands)
    windows += read
    key_windows = keys + values
    if bias is not None:
        block = [major if n > 1 else 1 for major, n in zip((q, kv), bias[0], strict=True)]
        windows += _padded(block, bias[1])
        windows += _padded(block, 4) if launch == "bias_gradient" else 0
    tile = blocks.block_q * blocks.block_kv * 4
    slots = 2 * tile
    if launch == "forward":
        windows += q * 4 * (1 if score_mod is None and bias is None else 2)  # lse, its correction
        scratch = 0 if one_tile_per_query else 2 * q * 4 + _sums(q, heads.Dv, blocks)
    else:
        windows += 2 * q * 4  # lse, delta
        windows += read if score_mod else 0  # gradients of what it reads
        slots *= 2
        made = {
            "dq": (queries, q, heads.D),
            "dk": (keys, kv, heads.D),
            "dv": (values, kv, heads.Dv),
        }
        scratch = 0
        for name in MAKES.get(launch, ()):
            window, length, dim = made[name]
            if name == "dq":
                windows += window
            else:
                key_windows += window
            scratch += 0 if one_tile_per_query and name == "dq" else _sums(length, dim, blocks)
    direction = "forward" if launch == "forward" else "backward"
    how = "float32" if itemsize == 4 else "streamed" if blocks.streamed else "held"
    dims = max(heads.D, heads.Dv)
    spilled = SPILLED[direction, how] * tile
    if how == "float32":
        if direction == "forward" and dims <= 128:
            spilled -= 2.3 * tile
        spilled = min(spilled, MOST_OF_FLOAT32[direction])
    if how == "streamed":
        spilled = max(spilled, written_out * _by_tile(direction, tile, blocks.block_q, dims))
    tiles = slots + spilled
    if not loops and how != "float32":
        tiles = _without_loops(direction, how, tile, dims, written_out)
    if direction == "forward" and chip in ("v4", None):
        tiles += MORE_ON_V4
    if bias is not None:
        tiles += (1.7 if how == "float32" else 1) * tile
    if one_tile_per_query:  # some rows more than first keys have, and than a tile without them
        tiles += slots / tile * max(first_keys + 16, 32) * blocks.block_q * 4
    if any(rows > 1 for rows, _, _ in operands):
        tiles += tile
    if score_mod is not None:
        tiles += 1.15 * tile - 80 * 2**10 if direction == "forward" else (2 + score_mod) * tile
        if relative:  # 128 rows, moved, of what a tile reads
            moved = 128 * (blocks.block_q + blocks.block_kv) * 4
            tiles += 1.1 * moved if direction == "forward" else 4 * moved
    windows = 2 * windows + blocks.key_buffers * key_windows
    return int(1.02 * (windows + scratch + tiles)) + 2**16


def _by_tile(direction: str, tile: int, block_q: int, dims: int) -> float:
    """What each tile that is written out beside loops puts away, where tiles are streamed."""
    if direction == "forward":
        return 0.2 * tile + 1.2 * _padded((block_q, dims), 4)  # its queries' sums
    return (0.3 + 0.62 * dims / 128) * max(tile - 0.4 * 2**20, 0)


def _without_loops(direction: str, how: str, tile: int, dims: int, written_out: int) -> float:
    """For the tiles themselves where all are written out: scores pass through registers, and their
    slots are gone."""
    if direction == "backward":
        return 3.6 * tile
    if how == "streamed":
        return max(0.5 + dims / 100, 0.7 + 0.17 * written_out) * tile + 450 * 2**10
    return min(4 * tile, (1.2 + 0.05 * written_out) * tile + 400 * 2**10)


def _sums(length: int, dim: int, blocks: Blocks) -> int:
    return _padded((length, dim) if blocks.streamed else (dim, length), 4)


def _padded(shape, itemsize: int) -> int:
    """Bytes of an array in VMEM: rows of 128 lanes, in registers of 8 rows of 32 bits; a single row
    stands alone."""
    rows, columns = shape
    packed = 4 // itemsize
    rows = packed if rows <= packed else round_up(rows, SUBLANES * packed)
    return rows * round_up(columns) * itemsize
