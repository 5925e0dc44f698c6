"""What a step of decoding costs on a TPU that is not there; a program.

    python -m tests.decode.estimate v6e

prints a table in Markdown. A step is one of a loop's, where nothing has to be copied for it.
"""

from __future__ import annotations

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smalti.decode import RingBuffer, attend
from smalti.decode.tpu import blocks
from smalti.decode.tpu.write import firsts
from smalti.estimate import compile_for, estimate
from smalti.tpu.lanes import round_up

STEPS = 100


@dataclasses.dataclass(frozen=True)
class Shape:
    B: int = 8
    T: int = 1
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    window: int = 4096
    dtype: str = "bfloat16"
    length: int = 100_000  # so many tokens were there before
    sinks: int = 4

    @property
    def slots(self) -> int:
        return self.sinks + self.window

    @property
    def live_bytes(self) -> int:
        """Of the keys and values that are there."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return 2 * self.B * self.Hkv * self.D * min(self.length, self.slots) * itemsize

    def scalars(self) -> dict[str, dict[int, np.ndarray]]:
        """What decides the kernels' control flow, by kernel and operand."""
        rows = RingBuffer.rows(self.sinks, self.window, self.D, self.D)
        block = blocks.choose(
            Hkv=self.Hkv,
            rows=rows,
            query_rows=round_up(self.Hq // self.Hkv * self.T, 8),
            D=self.D,
            Dv=self.D,
            itemsize=jnp.dtype(self.dtype).itemsize,
        ).rows
        position = self.length + np.arange(self.T)
        ring = self.sinks + (position - self.sinks) % self.window
        slot = np.where(position < self.sinks, position, ring)
        live = -(-min(self.length, self.slots) // block)

        def by_sequence(numbers) -> np.ndarray:
            return np.repeat(np.array(numbers, np.int32)[:, None], self.B, axis=1)

        is_first = np.asarray(firsts(by_sequence(slot), rows, self.D))
        return {
            "smalti_decode": {0: by_sequence([self.length, slot[0], self.T, live])},
            "smalti_decode_write": {0: by_sequence(slot), 1: np.concatenate([is_first] * 2)},
        }


def program(shape: Shape, implementation: str | None):
    """Steps after one another, each of the last one's results; and the shapes of its arguments."""
    s = shape
    lengths = np.full(s.B, s.length, np.int32)
    cache = jax.eval_shape(
        lambda: RingBuffer.empty(s.B, s.Hkv, s.D, sinks=s.sinks, window=s.window, dtype=s.dtype)
    )

    def steps(q, k, v, cache_k, cache_v):
        def body(_, carry):
            q, *rows = carry
            out, after = attend(
                q, RingBuffer(*rows, lengths, s.sinks, s.window), k, v,
                positions="cache", implementation=implementation,
            )  # fmt: skip
            return out, after.k, after.v

        return lax.fori_loop(0, STEPS, body, (q, cache_k, cache_v))

    q, kv = ((s.B, s.T, heads, s.D) for heads in (s.Hq, s.Hkv))
    new = [jax.ShapeDtypeStruct(x, s.dtype) for x in (q, kv, kv)]
    return steps, (*new, cache.k, cache.v)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step, of a loop."""

    time_us: float
    floor_us: float  # what is live over the bandwidth of HBM
    kernels_us: dict[str, float]
    bytes_read: int  # by the kernels
    unpriced: tuple[str, ...]  # what has no price, and is left out


def estimated(shape: Shape, chip: str, implementation: str | None = None) -> Step:
    steps, shapes = program(shape, implementation)
    compiled = compile_for(steps, *shapes, chip=chip)
    names = set(re.findall(r"%(smalti_decode\S*) = ", compiled.hlo))
    scalars = shape.scalars()
    found = estimate(compiled, operands={name: scalars[name.partition(".")[0]] for name in names})
    us = 1e6 / found.core.clock_hz
    ops = [op for op in found.schedule.ops if op.path and not op.thread]
    kernels = [op for op in ops if op.kind == "kernel"]
    return Step(
        time_us=sum((op.cycles or 0) * op.count for op in ops) * us / STEPS,
        floor_us=shape.live_bytes / found.core.hbm_bytes_per_s * 1e6,
        kernels_us={op.name.partition(".")[0]: (op.cycles or 0) * us for op in kernels},
        bytes_read=sum(op.bytes_hbm_read or 0 for op in kernels),
        unpriced=tuple(op.name for op in found.schedule.ops if op.priced_by == "nobody"),
    )


# Caches larger than VMEM, in which XLA would keep one from step to step: those of all layers of a
# model do not fit there.
ROWS = [
    Shape(),
    Shape(T=4),
    Shape(B=64, window=1020),
    Shape(window=16380, B=2),
    Shape(window=8188, D=64),
    Shape(length=1000),
    Shape(B=256, window=252),
    Shape(dtype="float32"),
]


def main(chip: str) -> None:
    print("| shape | floor, µs | kernels, µs | step, µs | XLA path's step, µs |")
    print("|---|---|---|---|---|")
    default = Shape()
    for shape in ROWS:
        values = dataclasses.asdict(shape)
        changed = [f"{n}={x}" for n, x in values.items() if x != getattr(default, n)]
        name = ", ".join(changed) or ", ".join(f"{n}={x}" for n, x in values.items())
        ours, xla = (estimated(shape, chip, which) for which in (None, "reference"))
        kernels = " + ".join(f"{x:.1f}" for x in ours.kernels_us.values())
        least = "≥ " if xla.unpriced else ""
        print(
            f"| {name} | {ours.floor_us:.1f} | {kernels} | {ours.time_us:.1f} | "
            f"{least}{xla.time_us:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
