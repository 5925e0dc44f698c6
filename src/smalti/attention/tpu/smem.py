"""Scalar memory: what of a call must be there at once, and the refusal of what does not fit.

Lists of tiles are split by pairs of major blocks, of which two are there at a time; numbers of
masks and of ``score_mod``, one for each batch entry and head, are there as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu.mods import KernelMod, Sizes, split
from smalti.masks.traced_mod import TracedMod
from smalti.tpu.lanes import round_up

BYTES = 2**20 - 2**16  # of 1 MiB on every chip, less some for the compiler's own
NAMES = {
    "fetch": "the blocks that pairs without tiles hold",
    "pairs": "the pairs of blocks that have tiles",
    "tiles": "two lists of tiles",
    "mask": "the mask's numbers",
    "score_mod": "the numbers of score_mod",
    "sinks": "sinks",
}


def bytes_of_numbers(mod: TracedMod, sizes: Sizes, name: str) -> int:
    """Of a mod's operands, from their shapes alone. Raises what `mods.split` raises."""
    kept: list[KernelMod] = []

    def operands():
        kernel_mod, arrays = split(mod, sizes, name)
        kept.append(kernel_mod)
        return arrays

    shapes = jax.eval_shape(operands)
    pairs = zip(kept[0].operands, shapes, strict=True)
    return sum(_bytes(*x.shape[:2]) for operand, x in pairs if operand.kind == "number")


def refusal(taken: Mapping[str, int]) -> str | None:
    """Says what does not fit, by what it is for; None where all does."""
    total = sum(taken.values())
    if total <= BYTES:
        return None
    parts = " + ".join(f"{size:,} for {NAMES[name]}" for name, size in taken.items() if size)
    return (
        f"the scalars of this call take {total:,} bytes of SMEM ({parts}), and kernels have "
        f"{BYTES:,}. Split batch or heads over several calls or devices, or use "
        "implementation='blockwise'."
    )


def check(inputs: Sequence[Any]) -> None:
    """Raises NotImplementedError for inputs of a kernel (`grid.Block`) that do not fit: blocks are
    known by now, and it is too late for another implementation."""
    taken: dict[str, int] = {}
    for x in inputs:
        if x.prefetched:
            size = x.array.size * 4
        elif x.spec.memory_space == pltpu.SMEM:
            copies = 1 if x.spec.block_shape is None else 2
            size = copies * _bytes(*x.array.shape[-2:])
        else:
            continue
        taken[x.name] = taken.get(x.name, 0) + size
    if (why := refusal(taken)) is not None:
        raise NotImplementedError(f"smalti.attention: {why}")


def _bytes(rows: int, columns: int) -> int:
    return rows * round_up(columns) * 4
