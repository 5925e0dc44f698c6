"""What the forward and the backward kernel share: shapes, block sizes and the rotation.

Both kernels see the projections as ``[B, S, H·D]``, which is how a matrix product leaves them: a
head is then a range of lanes, and writing it to ``[B, H, S, D]`` moves whole rows, so the layout
step needs no transposition inside the kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES = 128
# Half of the 16 MiB of scoped VMEM that a kernel gets unless its user asks for more; the other
# half is for what the body holds in float32.
VMEM_BUDGET_BYTES = 8 * 2**20
# The smallest is the sublane tile of 16-bit types.
BLOCK_S_CHOICES = (512, 256, 128, 64, 32, 16)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is fixed when the step is traced. ``block_s=None`` chooses by VMEM."""

    norm_eps: float
    interpret: Any = False
    block_s: int | None = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of one call, and the blocks they imply. Grid: (sequence tiles, B).

    The batch is the inner dimension, so that tables shared by it are fetched once per tile.
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

    def block_s(self, *, copies: int, wanted: int | None) -> int:
        """Rows in a tile: S itself if that fits, else a multiple of the sublane tile.

        ``copies`` counts the times that Q, K and V pass through VMEM, in whichever layout.
        """
        if wanted is None:
            heads = self.Hq + self.Hkv
            lanes = heads * round_up(self.D, LANES) + self.Hkv * round_up(self.Dv, LANES)
            tables = 2 * round_up(self.D, LANES) * 4
            row_bytes = 2 * (copies * lanes * self.itemsize + tables)  # double-buffered
            fits = [n for n in BLOCK_S_CHOICES if n * row_bytes <= VMEM_BUDGET_BYTES]
            wanted = fits[0] if fits else BLOCK_S_CHOICES[-1]
        return min(self.S, wanted)

    def projected(self, block_s: int, heads: int, dim: int) -> pl.BlockSpec:
        """A tile ``[block_s, H·D]`` of ``[B, S, H·D]``."""
        return pl.BlockSpec((None, block_s, heads * dim), lambda i, b: (b, i, 0))

    def by_head(self, block_s: int, heads: int, dim: int) -> pl.BlockSpec:
        """A tile ``[H, block_s, D]`` of ``[B, H, S, D]``."""
        return pl.BlockSpec((None, heads, block_s, dim), lambda i, b: (b, 0, i, 0))

    def table(self, block_s: int, table) -> pl.BlockSpec:
        """A tile ``[block_s, D]`` of ``[B or 1, S, D]``."""
        shared = table.shape[0] == 1
        return pl.BlockSpec((None, block_s, self.D), lambda i, b: (0 if shared else b, i, 0))

    def scale(self) -> pl.BlockSpec:
        """All of ``[1, D]``."""
        return pl.BlockSpec((1, self.D), lambda i, b: (0, 0))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def heads_in_lanes(x: jax.Array) -> jax.Array:
    """``[B, S, H, D]`` as ``[B, S, H·D]``."""
    return x.reshape(*x.shape[:2], -1)


def head(h: int, dim: int) -> slice:
    """The lanes of head ``h``."""
    return slice(h * dim, (h + 1) * dim)


def rotation_tables(cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``[..., S, D/2]`` → ``[B or 1, S, D]``, with the sign of the rotation in the sine.

    A row of D/2 lanes would take up as much memory, for it is padded to 128.
    """
    cos = jnp.concatenate([cos, cos], axis=-1)
    sin = jnp.concatenate([-sin, sin], axis=-1)
    return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])


def partner(x):
    """Each lane's partner in its rotation, ``i ↔ i + D/2``; its own inverse.

    Only this and `rotation_tables` know the convention of the pairs.
    """
    half = x.shape[-1] // 2
    return jnp.concatenate([x[:, half:], x[:, :half]], axis=-1)


def rotate(x, cos, sin):
    return x * cos + partner(x) * sin


def rotate_transposed(g, cos, sin):
    """The gradient of `rotate` in ``x``."""
    return g * cos + partner(g * sin)


def normalized(x, eps: float):
    """``x / rms(x)`` and ``1 / rms(x)``: ``[block_s, D]`` and ``[block_s, 1]``, float32."""
    x = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse_rms, inverse_rms


def out_struct(like: jax.Array, shape, dtype) -> jax.ShapeDtypeStruct:
    """An output that varies over the same mesh axes as ``like``, as `shard_map` demands."""
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
