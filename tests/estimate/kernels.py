"""Pallas kernels whose bytes, tiles and products can be counted by hand."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Shape = jax.ShapeDtypeStruct
X = Shape((1024, 128), jnp.float32)
TABLE = np.array([3, 0, 7, 1, 2, 5, 4, 6], np.int32)
BLOCK = (128, 128)


def matmul(size: Sequence[int], blocks: Sequence[int], dtype=jnp.bfloat16, acc=jnp.float32):
    """`[M, K] @ [K, N]` as in jax's tutorial: function and shapes; sizes are (M, K, N)."""
    (m, k, n), (bm, bk, bn) = size, blocks

    def kernel(a, b, out, scratch):
        @pl.when(pl.program_id(2) == 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += jnp.dot(a[...], b[...], preferred_element_type=acc)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            out[...] = scratch[...].astype(out.dtype)

    def matmul(a, b):
        return pl.pallas_call(
            kernel,
            out_shape=Shape((m, n), acc),
            grid=(m // bm, n // bn, k // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
                pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), acc)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
        )(a, b)

    return matmul, (Shape((m, k), dtype), Shape((k, n), dtype))


def with_table(kernel, table: np.ndarray = TABLE, scratch=(), in_spec=None, index=None):
    """A function of X that runs `kernel(table, x, out, *scratch)` for each of 8 blocks of rows."""

    def function(x):
        block = pl.BlockSpec(BLOCK, index or (lambda i, table: (i, 0)))
        return pl.pallas_call(
            kernel,
            out_shape=X,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(8,),
                in_specs=[in_spec or block],
                out_specs=pl.BlockSpec(BLOCK, lambda i, table: (i, 0)),
                scratch_shapes=list(scratch),
            ),
        )(jnp.asarray(table), x)

    return function


def sum_of_table(table, x, out):
    """Adds 1 as often as the table says."""
    out[...] = x[...]

    def body(_, carry):
        out[...] += 1.0
        return carry

    lax.fori_loop(0, table[pl.program_id(0)], body, 0)


def halving(table, x, out):
    """Adds 1 once for every bit of the table's entry."""
    out[...] = x[...]

    def body(n):
        out[...] += 1.0
        return n // 2

    lax.while_loop(lambda n: n > 0, body, table[pl.program_id(0)])


def nested(table, x, out):
    """Adds 1 where the entry is above 2 and even."""
    entry = table[pl.program_id(0)]
    out[...] = x[...] * 2

    @pl.when(entry > 2)
    def _():
        out[...] = x[...] * 3

        @pl.when(entry % 2 == 0)
        def _():
            out[...] += 1.0


def divided(table, x, out):
    """Adds 1 where (7 i + 5) // (entry + 3) is above 2 and its remainder above 0."""
    i = pl.program_id(0)
    by = table[i] + 3
    out[...] = x[...] * 2

    @pl.when(((i * 7 + 5) // by > 2) & ((i * 7 + 5) % by > 0))
    def _():
        out[...] += 1.0


def counted_zeros(table, x, out):
    """Adds 1 where the entry, as a word, begins with 30 zeros or more."""
    out[...] = x[...] * 2

    @pl.when(lax.clz(table[pl.program_id(0)]) >= 30)
    def _():
        out[...] += 1.0


def remembered(table, x, out, seen):
    """Adds 1 where the entry is above the sum of those before it."""
    i = pl.program_id(0)

    @pl.when(i == 0)
    def _():
        seen[0] = 0

    out[...] = x[...] * 2

    @pl.when(table[i] > seen[0])
    def _():
        out[...] += 1.0

    seen[0] = seen[0] + table[i]


def double_buffered(table, x, out, buffer, semaphores):
    """Copies its input itself, a block ahead."""
    i, steps = pl.program_id(0), pl.num_programs(0)

    def copy(j):
        return pltpu.make_async_copy(
            x.at[pl.ds(j * 128, 128)], buffer.at[j % 2], semaphores.at[j % 2]
        )

    @pl.when(i == 0)
    def _():
        copy(0).start()

    @pl.when(i + 1 < steps)
    def _():
        copy(i + 1).start()

    copy(i).wait()
    out[...] = buffer[i % 2] * 2


def signalling(table, x, out, semaphore):
    pl.semaphore_signal(semaphore, 2)
    out[...] = x[...] * 2
    pl.semaphore_wait(semaphore, 2)


def double_buffer():
    return with_table(
        double_buffered,
        scratch=(pltpu.VMEM((2, *BLOCK), jnp.float32), pltpu.SemaphoreType.DMA((2,))),
        in_spec=pl.BlockSpec(memory_space=pltpu.HBM),
    )


def table_reader(shape: Sequence[int], dtype):
    """Adds 1 for every element of a table that is (37 n + 11) % 101, n its place in it."""
    out_shape = Shape((8, 128), jnp.float32)

    def kernel(table, x, out):
        out[...] = x[...]

        def walk(left, place, index):
            if left:

                def body(i, carry):
                    walk(left[1:], place * left[0] + i, (*index, i))
                    return carry

                lax.fori_loop(0, left[0], body, 0)
                return

            @pl.when(table[index].astype(jnp.int32) == lax.rem(place * 37 + 11, 101))
            def _():
                out[...] += 1.0

        walk(tuple(shape), jnp.int32(0), ())

    def function(table, x):
        block = pl.BlockSpec((8, 128), lambda i, table: (0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block
            ),
        )(table, x)

    places = np.arange(np.prod(shape))
    table = ((places * 37 + 11) % 101).reshape(shape).astype(dtype)
    return function, (Shape(tuple(shape), dtype), out_shape), table
