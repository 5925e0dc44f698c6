"""Bytes from and to HBM, by the compiled schedule: each array is read or written once."""

import math

import jax
import jax.numpy as jnp
import pytest

from smalti.estimate import compile_for, estimate
from smalti.preprocess import qk_norm_rope
from tests.support.libtpu import needs_libtpu

pytestmark = [
    pytest.mark.slow,
    needs_libtpu,
]

S = 2048
# Reserves nearly all of v7x's 64 MiB of VMEM for kernels, so that XLA keeps no array there.
CHIP, FLAGS = "v7x", ["--xla_tpu_scoped_vmem_limit_kib=61440"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "D", "by_token"),
    [
        (1, 6, 6, 128, False),
        (1, 8, 2, 128, False),
        (1, 8, 2, 64, False),
        (1, 8, 8, 64, True),
        (8, 8, 2, 128, True),
        (8, 8, 8, 64, False),
    ],
)
def test_hbm_traffic_is_that_of_each_array_once(B, Hq, Hkv, D, by_token, direction):
    projected = [jax.ShapeDtypeStruct((B, S, H * D), jnp.bfloat16) for H in (Hq, Hkv, Hkv)]
    by_head = [jax.ShapeDtypeStruct((B, H, S, D), jnp.bfloat16) for H in (Hq, Hkv, Hkv)]
    scales = [jax.ShapeDtypeStruct((D,), jnp.float32)] * 2
    positions = jax.ShapeDtypeStruct((B, S) if by_token else (S,), jnp.int32)

    def forward(positions, q, k, v, q_scale, k_scale):
        q, k, v = (x.reshape(B, S, -1, D) for x in (q, k, v))
        scales = {"q_scale": q_scale, "k_scale": k_scale}
        return qk_norm_rope(q, k, v, positions=positions, **scales)

    def backward(positions, cotangents, *primals):
        return jax.vjp(lambda *xs: forward(positions, *xs), *primals)[1](cotangents)

    if direction == "forward":
        program = compile_for(forward, positions, *projected, *scales, chip=CHIP, flags=FLAGS)
        arrays = [*projected, *by_head, positions]
    else:
        shapes = (positions, tuple(by_head), *projected, *scales)
        program = compile_for(backward, *shapes, chip=CHIP, flags=FLAGS)
        q, k, _ = projected
        arrays = [q, k, *by_head, *projected, positions]

    found = estimate(program)
    (kernel,) = found.schedule.kernels
    # Copies bring a program's own arguments and results, where their heads have fewer lanes than a
    # register, from and to the layout that kernels take. Between two kernels there are none.
    own = [op for op in found.schedule.ops if not op.opcode.startswith("copy")]
    moved = sum((op.bytes_hbm_read or 0) + (op.bytes_hbm_written or 0) for op in own)
    once = sum(map(bytes_in_hbm, arrays))
    assert kernel in own
    assert once <= moved <= 1.05 * once, moved / once


def bytes_in_hbm(array) -> int:
    """With its last axis filled up to 128 lanes, as a TPU stores it."""
    *outer, lanes = array.shape
    return math.prod(outer) * -(-lanes // 128) * 128 * array.dtype.itemsize
