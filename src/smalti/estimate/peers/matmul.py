"""Matrix products with published times: a blocked Pallas kernel, and XLA's.

The kernel is the scheme of jax's guide "Pallas TPU: matrix multiplication"
(docs/pallas/tpu/matmul.ipynb): a grid (m, n, k) with k innermost, and a float32 accumulator in VMEM
that is zeroed at the first k and rounded to the result at the last. `calibrate` predicts the times
that the guide prints for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.estimate.peers.variant import Variant


def matmul(x: jax.Array, y: jax.Array, *, bm: int, bk: int, bn: int) -> jax.Array:
    """x [M, K] times y [K, N] in blocks [bm, bk] and [bk, bn]; the result has x's dtype.

    ValueError: a block that does not divide its side.
    """
    (m, k), (_, n) = x.shape, y.shape
    for name, block, side in (("bm", bm, m), ("bk", bk, k), ("bn", bn, n)):
        if side % block:
            raise ValueError(f"{name}={block} does not divide {side}")

    def kernel(x_ref, y_ref, out_ref, acc_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _start():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(step == k // bk - 1)
        def _finish():
            out_ref[...] = acc_ref[...].astype(out_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, step: (i, step)),
            pl.BlockSpec((bk, bn), lambda i, j, step: (step, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, step: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="matmul",
    )(x, y)


def matmul_variant(m: int, k: int, n: int, *, bm: int, bk: int, bn: int) -> Variant:
    """[m, k] × [k, n] in bfloat16 by the Pallas kernel above."""

    def fn(x, y):
        return matmul(x, y, bm=bm, bk=bk, bn=bn)

    fn.__name__ = fn.__qualname__ = "matmul"
    return Variant(
        peer="matmul",
        blocks={"bm": bm, "bk": bk, "bn": bn},
        source="jax docs/pallas/tpu/matmul.ipynb",
        build=lambda: (fn, _operands(m, k, n)),
    )


def xla_matmul_variant(m: int, k: int, n: int) -> Variant:
    """[m, k] × [k, n] in bfloat16 as XLA compiles `jnp.matmul`."""
    return Variant(
        peer="xla_matmul",
        blocks={},
        source="jax docs/pallas/tpu/matmul.ipynb",
        build=lambda: (jnp.matmul, _operands(m, k, n)),
    )


def _operands(m: int, k: int, n: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
