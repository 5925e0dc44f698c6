"""Small functions with Pallas kernels, good and bad, for the compiler."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.estimate.compile.target import Target, find_target

X = jax.ShapeDtypeStruct((512, 128), jnp.float32)


def v6e() -> Target:
    return find_target("v6e")


def double(x, rows=128, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // rows,),
        in_specs=[block],
        out_specs=block,
        **options,
    )(x)


def scale_by_table(table, x):
    """`table` is scalar-prefetched: one number for each block of 128 rows."""

    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * table_ref[pl.program_id(0)].astype(jnp.float32)

    block = pl.BlockSpec((128, 128), lambda i, table: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=X,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4,), in_specs=[block], out_specs=block
        ),
    )(table, x)


def long_gather(x, indices):
    """Mosaic gathers within 8 rows only."""

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = jnp.take_along_axis(x_ref[...], i_ref[...], axis=0)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, indices)
