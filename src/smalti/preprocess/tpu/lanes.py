"""How heads share lanes, and products with matrices of zeros and ones, which move lanes exactly.

A vector register has 128 lanes. Heads of 64 in bfloat16 go through a kernel two at a time, of 32
four at a time: a *chunk* of heads. What a head's lanes exchange, the MXU moves, which has nothing
else to do here: a product with a permutation has one term a sum, and is exact.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smalti.tpu.lanes import LANES

from ..rope import Rope


def heads_in_chunk(D: int, itemsize: int) -> int:
    # Sums over some of the lanes are the MXU's, in an order of its own: good enough for 16 bits.
    return LANES // D if LANES % D == 0 and itemsize == 2 else 1


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Heads ``first`` to ``first + count − 1`` of D lanes each."""

    first: int
    count: int
    D: int

    @property
    def lanes(self) -> slice:
        """Theirs among the lanes of ``[block_s, H·D]``."""
        return slice(self.first * self.D, (self.first + self.count) * self.D)

    @property
    def width(self) -> int:
        return self.count * self.D

    def read(self, ref) -> jax.Array:
        """``[H, block_s, D]`` → ``[block_s, width]``."""
        return jnp.concatenate([ref[self.first + i] for i in range(self.count)], axis=-1)

    def write(self, ref, x) -> None:
        """``[block_s, width]`` → ``[H, block_s, D]``."""
        for i in range(self.count):
            ref[self.first + i] = x[:, i * self.D : (i + 1) * self.D]


def chunks(H: int, D: int, itemsize: int) -> Iterator[Chunk]:
    n = heads_in_chunk(D, itemsize)
    for first in range(0, H, n):
        yield Chunk(first, min(n, H - first), D)


def partner_matrix(rope: Rope, heads: int) -> np.ndarray:
    """``P [heads·D, heads·D]`` such that ``rotate(x) = x · cos + (x @ P) · sin`` in every head.

    ``x @ P`` is −b where x is a, and a where it is b, for each pair (a, b), and 0 in the lanes that
    do not turn. So ``Pᵀ = −P``, and as a pair's lanes have one angle,
    ``rotateᵀ(g) = g · cos − (g @ P) · sin``.
    """
    a, b = rope.pairs
    one_head = np.zeros((rope.head_dim, rope.head_dim), np.float32)
    one_head[b, a], one_head[a, b] = -1, 1
    return np.kron(np.eye(heads, dtype=np.float32), one_head)


def same_head(width: int, D: int) -> jax.Array:
    """``[width, width]`` bfloat16, made inside the kernel: 1 where both lanes are of one head."""
    row = lax.broadcasted_iota(jnp.int32, (width, width), 0)
    lane = lax.broadcasted_iota(jnp.int32, (width, width), 1)
    return jnp.where(row // D == lane // D, 1.0, 0.0).astype(jnp.bfloat16)


def exact_product(x: jax.Array, matrix: jax.Array, pieces: int = 3) -> jax.Array:
    """``x @ matrix`` in float32 for a bfloat16 matrix of 0 and ±1.

    The MXU multiplies bfloat16, with 8 bits of significand. A float32 ``x`` is cut into ``pieces``
    of 8 bits: 3 are all of it, 2 all of a square of a bfloat16, and 16 bits of any other. They
    stand side by side in one product: the MXU adds them up.
    """
    cut = []
    while x.dtype != jnp.bfloat16:
        # Bits are cut off rather than rounded: XLA, which runs this when it is interpreted, would
        # take a cast to bfloat16 and back for nothing.
        bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**16))
        piece = lax.bitcast_convert_type(bits, jnp.float32)
        cut.append(piece.astype(jnp.bfloat16))
        x = x - piece if len(cut) < pieces - 1 else (x - piece).astype(jnp.bfloat16)
    cut.append(x)
    return jnp.dot(
        jnp.concatenate(cut, axis=1),
        jnp.concatenate([matrix] * len(cut), axis=0),
        # Named, for `jax.default_matmul_precision` would ask of bfloat16 what it cannot do.
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def mean_of_head(x: jax.Array, D: int) -> jax.Array:
    """Each row's mean over the lanes of a head, in all of its lanes: ``[block_s, 1 or width]``.

    Good to 16 bits where several heads share the lanes, as those of bfloat16 do.
    """
    width = x.shape[1]
    if width == D:
        return jnp.mean(x, axis=1, keepdims=True)
    return exact_product(x, same_head(width, D), pieces=2) * np.float32(1 / D)
