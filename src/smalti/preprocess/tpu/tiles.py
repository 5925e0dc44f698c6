"""What the forward and the backward kernel share: configuration, shapes and block sizes.

Both kernels see the projections as ``[B, S, H·D]``, which is how a matrix product leaves them: a
head is then a range of lanes, and writing it to ``[B, H, S, D]`` moves whole rows, so the layout
step needs no transposition inside the kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.tpu.lanes import round_up
from smalti.varying import vary_like

from ..rope import Rope
from .lanes import heads_in_chunk, partner_matrix
from .rotation import steps_by_lane

# The batch is the inner axis of the grid, and angles are computed for its first element.
COMPILER_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))

# Three quarters of the 16 MiB of scoped VMEM that a kernel gets unless its user asks for more; the
# rest is for what the body holds in float32. Larger tiles wait less: of 256 rows the kernels take a
# tenth longer than of 512.
VMEM_BUDGET_BYTES = 12 * 2**20
# The smallest is the sublane tile of 16-bit types.
BLOCK_S_CHOICES = (512, 256, 128, 64, 32, 16)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is fixed when the step is traced. ``block_s=None`` chooses by VMEM."""

    norm_eps: float | None  # None: no normalisation
    rope: Rope
    interpret: Any = False
    block_s: int | None = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of one call, and the blocks they imply. Grid: (sequence tiles, B).

    The batch is the inner dimension, so that angles shared by it are computed once per tile.
    """

    B: int
    S: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    itemsize: int

    @classmethod
    def of(cls, q, k, v) -> "Shapes":
        B, S, Hq, D = q.shape
        return cls(B, S, Hq, k.shape[2], D, v.shape[3], q.dtype.itemsize)

    @property
    def width(self) -> int:
        """Lanes of a full chunk of heads."""
        return heads_in_chunk(self.D, self.itemsize) * self.D

    def block_s(self, wanted: int | None, *, gradients: bool) -> int:
        """Rows in a tile: S itself if that fits, else a multiple of the sublane tile."""
        if wanted is None:
            queries_and_keys, values = self.Hq + self.Hkv, self.Hkv
            in_lanes = round_up(self.Hq * self.D) + round_up(self.Hkv * self.D)
            lanes = (2 if gradients else 1) * in_lanes + round_up(values * self.Dv)
            lanes += queries_and_keys * round_up(self.D) + values * round_up(self.Dv)
            tables = 2 if gradients else 4
            row_bytes = 2 * lanes * self.itemsize  # double-buffered
            row_bytes += tables * round_up(self.width) * 4
            fits = [n for n in BLOCK_S_CHOICES if n * row_bytes <= VMEM_BUDGET_BYTES]
            wanted = fits[0] if fits else BLOCK_S_CHOICES[-1]
        return min(self.S, wanted)

    def projected(self, block_s: int, heads: int, dim: int) -> pl.BlockSpec:
        """A tile ``[block_s, H·D]`` of ``[B, S, H·D]``."""
        return pl.BlockSpec((None, block_s, heads * dim), lambda i, b: (b, i, 0))

    def by_head(self, block_s: int, heads: int, dim: int) -> pl.BlockSpec:
        """A tile ``[H, block_s, D]`` of ``[B, H, S, D]``."""
        return pl.BlockSpec((None, heads, block_s, dim), lambda i, b: (b, 0, i, 0))


def whole(x) -> pl.BlockSpec:
    """All of a constant of two axes, copied once."""
    return pl.BlockSpec(x.shape, lambda i, b: (0, 0))


def row(positions) -> pl.BlockSpec:
    """A tile ``[1, n]`` of `rotation.tiled_positions`."""
    shared = positions.shape[0] == 1
    block = (None, None, *positions.shape[2:])
    return pl.BlockSpec(block, lambda i, b: (0 if shared else b, i, 0, 0))


def constants(config: Config, width: int, like: jax.Array) -> tuple[jax.Array, ...]:
    """The operands of both kernels that say who turns with whom and how far."""
    heads = width // config.rope.head_dim
    whole, rest = steps_by_lane(config.rope, heads)
    partner = jnp.asarray(partner_matrix(config.rope, heads), jnp.bfloat16)
    return vary_like((partner, jnp.asarray(whole), jnp.asarray(rest)), like)


def scale_by_lane(scale_ref, width: int) -> jax.Array:
    """Inside a kernel, a scale ``[1, D]`` for the lanes of a chunk of heads, ``[1, width]``."""
    return jnp.concatenate([scale_ref[...]] * (width // scale_ref.shape[1]), axis=1)


def heads_in_lanes(x: jax.Array) -> jax.Array:
    """``[B, S, H, D]`` as ``[B, S, H·D]``."""
    return x.reshape(*x.shape[:2], -1)
