"""The kernel that writes new tokens into the cache, in place.

XLA's scatter would bring the whole cache into another layout and back. Memory is read and written
by tiles of rows: those that new tokens go to are fetched, of several sequences at once, for a copy
takes its latency; then changed and sent back.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.tpu.lanes import round_up
from smalti.tpu.launch import launch
from smalti.varying import vary_over, varying_axes

from ..ring_buffer import RingBuffer, rows_per_tile
from .operands import as_kept, block_of, new_tokens, token_axis

VMEM_BUDGET_BYTES = 10 * 2**20


@dataclasses.dataclass(frozen=True)
class Rows:
    """Keys or values: their refs in the kernel."""

    new: jax.Ref  # [sequences, heads, new, dim], or its transpose: as the cache is kept
    before: jax.Ref  # [B, Hkv, rows, dim] in HBM
    after: jax.Ref  # the same memory
    tiles: jax.Ref  # [sequences, T, heads, tile, dim]
    semaphores: jax.Ref  # [sequences, T]
    dim: int

    @property
    def axis(self) -> int:
        """Of tokens, in a tile of several heads."""
        return 1 + token_axis(self.dim)

    def first_row(self, slot):
        """The first row of a slot's tile."""
        tile = rows_per_tile(self.dim)
        return pl.multiple_of(lax.div(slot, np.int32(tile)) * tile, tile)

    def copy(self, n, b, head, x, slot, *, back: bool):
        """Of the tile of token x's slot of sequence b, the n-th of this step, from a head on."""
        rows = pl.ds(self.first_row(slot), rows_per_tile(self.dim))
        heads = pl.ds(head, self.tiles.shape[2])
        place = (b, heads, *((slice(None), rows) if self.axis == 2 else (rows, slice(None))))
        tile, semaphore = self.tiles.at[n, x], self.semaphores.at[n, x]
        if back:
            return pltpu.make_async_copy(tile, self.after.at[place], semaphore)
        return pltpu.make_async_copy(self.before.at[place], tile, semaphore)

    def change(self, n, x, slot, slots) -> None:
        """A tile gets all of the sequence's new tokens that go to it."""
        rows = self.tiles[n, x]
        row = self.first_row(slot) + lax.broadcasted_iota(jnp.int32, rows.shape, self.axis)
        for t, own in enumerate(slots):
            token = lax.slice_in_dim(self.new[n], t, t + 1, axis=self.axis)
            rows = jnp.where(row == own, token, rows)
        self.tiles[n, x] = rows


def kernel(
    # prefetched
    slots_ref,  # [T, B] int32: where a token goes; out of bounds if it does not stay
    is_first_ref,  # [2·T, B] int32: whether a token is the first that goes to its tile
    *refs,  # keys' and values' in turns: new, before, after, tiles, semaphores
    dims: tuple[int, int],
):
    both = [Rows(*refs[i::2], dim=dim) for i, dim in enumerate(dims)]
    T, sequences = slots_ref.shape[0], both[0].tiles.shape[0]
    first_sequence = pl.program_id(0) * sequences
    head = pl.program_id(1) * both[0].tiles.shape[2]

    def every_tile(act):
        """act(n, b, x, slot, rows) for each tile that tokens go to, of each sequence of this step;
        the x-th is the first of them."""

        def of_token(n, x):
            b = first_sequence + n
            for i, rows in enumerate(both):
                pl.when(is_first_ref[i * T + x, b] == 1)(
                    functools.partial(act, n, b, x, slots_ref[x, b], rows)
                )

        @pl.loop(0, sequences)
        def _(n):
            pl.loop(0, T)(functools.partial(of_token, n))

    def fetch(n, b, x, slot, rows):
        rows.copy(n, b, head, x, slot, back=False).start()

    def change(n, b, x, slot, rows):
        rows.copy(n, b, head, x, slot, back=False).wait()
        rows.change(n, x, slot, [slots_ref[t, b] for t in range(T)])
        rows.copy(n, b, head, x, slot, back=True).start()

    def wait(n, b, x, slot, rows):
        rows.copy(n, b, head, x, slot, back=True).wait()

    for act in (fetch, change, wait):
        every_tile(act)


def firsts(slots, rows: int, dim: int):
    """int32 ``[T, B]``: whether a token is the first of those that go to its tile, and stay."""
    tile, T = slots // rows_per_tile(dim), slots.shape[0]
    earlier = np.tri(T, k=-1, dtype=bool)[..., None]  # [token, earlier token, 1]
    again = (earlier & (tile[:, None] == tile[None])).any(1)
    return ((slots < rows) & ~again).astype(jnp.int32)


def divisor(n: int, limit: int) -> int:
    """The largest of n up to the limit, or 1."""
    return max(m for m in range(1, max(min(n, limit), 1) + 1) if n % m == 0)


def written(cache: RingBuffer, k, v, lengths, *, interpret) -> RingBuffer:
    """As `RingBuffer.written`, for few tokens."""
    B, Hkv, T, D = k.shape
    dims = D, v.shape[3]
    slots = cache.new_slots(T, lengths).T  # [T, B]
    rows = cache.k.shape[2]
    new = new_tokens(k), new_tokens(v)
    is_first = jnp.concatenate([firsts(slots, rows, dim) for dim in dims])
    arrays = slots, is_first, *new, as_kept(cache.k), as_kept(cache.v)

    tiles = [block_of(dim, rows_per_tile(dim)) for dim in dims]
    new_blocks = [x.shape[2:] for x in new]  # each in two buffers
    padded = (round_up(m, 16) * round_up(n) for m, n in (*tiles * T, *new_blocks * 2))
    head_bytes = sum(padded) * k.dtype.itemsize
    heads = divisor(Hkv, VMEM_BUDGET_BYTES // head_bytes)
    sequences = divisor(B, VMEM_BUDGET_BYTES // (heads * head_bytes))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    k, v = launch(
        functools.partial(kernel, dims=dims),
        *vary_over(arrays, varying_axes(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B // sequences, Hkv // heads),
            in_specs=[
                *(
                    pl.BlockSpec((sequences, heads, *block), lambda i, h, *_: (i, h, 0, 0))
                    for block in new_blocks
                ),
                in_hbm,
                in_hbm,
            ],
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=[
                *(pltpu.VMEM((sequences, T, heads, *tile), k.dtype) for tile in tiles),
                *(pltpu.SemaphoreType.DMA((sequences, T)) for _ in tiles),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[4:]],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="smalti_decode_write",
    )
    k, v = (x.swapaxes(2, 3) if token_axis(dim) else x for x, dim in zip((k, v), dims, strict=True))
    return dataclasses.replace(cache, k=k, v=v, length=cache.length + lengths)
