"""How much of the cache a step of the kernel takes."""

from __future__ import annotations

import dataclasses

from smalti.tpu.lanes import LANES, round_up

# Of the 16 MiB of VMEM that a kernel gets unless its user asks for more.
VMEM_BUDGET_BYTES = 10 * 2**20
# A step's copy takes so long that its fixed costs are small beside it; and the first one, which
# nothing hides, is short.
STEP_BYTES = 2**20
MOST_HEADS = 8  # of a step: they are written out


@dataclasses.dataclass(frozen=True)
class Blocks:
    heads: int  # key heads of a step
    slots: int  # of each


def choose(*, Hkv: int, slots: int, rows: int, D: int, Dv: int, itemsize: int) -> Blocks:
    """rows: of queries, of a key head."""
    lanes = round_up(D) + round_up(Dv)
    slot_bytes = lanes * itemsize
    # Two buffers; keys and values cut up for the matrix unit, values cleaned; scores and weights.
    working_bytes = 2 * slot_bytes + lanes * (2 if itemsize == 2 else 10) + rows * 16
    most = min(STEP_BYTES // slot_bytes, VMEM_BUDGET_BYTES // working_bytes)
    if slots > most:
        return Blocks(1, max(most // LANES, 1) * LANES)
    fits = [h for h in range(1, MOST_HEADS + 1) if Hkv % h == 0 and h * slots <= most]
    return Blocks(max(fits), slots)
