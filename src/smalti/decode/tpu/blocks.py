"""How much of the cache a step of the kernel takes."""

from __future__ import annotations

import dataclasses

from smalti.tpu.lanes import LANES, round_up

from ..ring_buffer import rows_along_lanes

# Of the 16 MiB of VMEM that a kernel gets unless its user asks for more.
VMEM_BUDGET_BYTES = 12 * 2**20
# A step's copy should take longer than its chain of product, maximum, exponential and product, some
# 700 cycles; several heads, written out, fill the gaps in each other's. Of 64 steps of 3 MiB the
# first, which nothing hides, is little.
STEP_BYTES = 3 * 2**20
MOST_HEADS = 8
MOST_HEADS_OF_LONG = 4


@dataclasses.dataclass(frozen=True)
class Blocks:
    heads: int  # key heads of a step
    rows: int  # of the cache, of each


def choose(*, Hkv: int, rows: int, query_rows: int, D: int, Dv: int, itemsize: int) -> Blocks:
    """rows, query_rows: of the cache and of queries, of a key head."""
    width = sum(round_up(x, 16) if rows_along_lanes(x) else round_up(x) for x in (D, Dv))
    # Two buffers; of one head at a time keys and values cut up for the matrix unit, values without
    # what is not live, scores and weights.
    buffered = 2 * width * itemsize
    working = width * (2 if itemsize == 2 else 10) + query_rows * 16
    for heads in range(min(Hkv, MOST_HEADS), 0, -1):
        if Hkv % heads:
            continue
        most = STEP_BYTES // (heads * width * itemsize)
        most = min(most, VMEM_BUDGET_BYTES // (heads * buffered + 2 * working))
        if rows <= most:
            return Blocks(heads, rows)
        if heads <= MOST_HEADS_OF_LONG and most >= LANES:
            most = most // LANES * LANES
            return Blocks(heads, round_up(-(-rows // -(-rows // most))))  # alike, or almost
    return Blocks(1, LANES)
