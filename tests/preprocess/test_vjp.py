"""The kernels under JAX's transformations."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import calls, oracle

CASE = oracle.draw(B=3, S=6)
step = jax.jit(calls.public("pallas"))


def loss(*arrays):
    return sum(jnp.sum(jnp.sin(x)) for x in step(*arrays))


ARGUMENTS = (*calls.arrays(CASE), np.array([3, 1, 4, 1, 5, 9], np.int32))
FIRST_FIVE = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def gradients():
    return jax.jit(jax.grad(loss, FIRST_FIVE))(*ARGUMENTS)


def assert_close(got, expected):
    """Equal up to the order of sums: other programs, same formula."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_vmap_over_the_batch_gives_the_batched_result_and_gradients(gradients):
    single = [x[:, None] for x in ARGUMENTS[:3]]  # a batch of batches of one
    axes = (0, 0, 0, None, None, None)
    assert_close(
        [x[:, 0] for x in jax.jit(jax.vmap(step, axes))(*single, *ARGUMENTS[3:])],
        step(*ARGUMENTS),
    )

    def summed(*arrays):
        return jnp.sum(jax.vmap(loss, axes)(*arrays))

    dq, dk, dv, *scales = jax.jit(jax.grad(summed, FIRST_FIVE))(*single, *ARGUMENTS[3:])
    assert_close((dq[:, 0], dk[:, 0], dv[:, 0], *scales), gradients)


def test_vmap_over_scales_and_positions():
    stack = [np.stack([x, x + 1]) for x in ARGUMENTS[3:]]
    axes = (None, None, None, 0, 0, 0)
    got = jax.jit(jax.vmap(step, axes))(*ARGUMENTS[:3], *stack)
    for i in range(2):
        assert_close([x[i] for x in got], step(*ARGUMENTS[:3], *(x[i] for x in stack)))


def test_an_offset_may_be_traced_and_mapped():
    offsets = np.array([7, 0, -2], np.int32)
    one_each = step(*ARGUMENTS, offsets)
    mapped = jax.vmap(step, (0, 0, 0, None, None, None, 0))
    single = [x[:, None] for x in ARGUMENTS[:3]]
    assert_close([x[:, 0] for x in jax.jit(mapped)(*single, *ARGUMENTS[3:], offsets)], one_each)
    for i, offset in enumerate(offsets):
        alone = step(*(x[i : i + 1] for x in ARGUMENTS[:3]), *ARGUMENTS[3:], offset)
        assert_close(alone, [x[i : i + 1] for x in one_each])


def test_checkpoint_and_scan_keep_the_gradients(gradients):
    def rematerialised(*arrays):
        return jax.checkpoint(loss)(*arrays)

    assert_close(jax.jit(jax.grad(rematerialised, FIRST_FIVE))(*ARGUMENTS), gradients)

    def scanned(*arrays):
        def body(total, qkv):
            return total + loss(*(x[None] for x in qkv), *arrays[3:]), None

        return jax.lax.scan(body, jnp.float32(0), arrays[:3])[0]

    assert_close(jax.jit(jax.grad(scanned, FIRST_FIVE))(*ARGUMENTS), gradients)


def test_only_first_reverse_mode_derivatives_exist():
    def of_q(q):
        return loss(q, *ARGUMENTS[1:])

    q = ARGUMENTS[0]
    with pytest.raises(NotImplementedError, match=r"second derivatives .* implementation='xla'"):
        jax.grad(lambda q: jnp.sum(jax.grad(of_q)(q)))(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(of_q, (q,), (q,))


SHARDED = """
    import jax, numpy as np
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import AxisType, PartitionSpec as P
    from smalti.preprocess import qk_norm_rope
    from tests.preprocess import calls, oracle

    case = oracle.draw(B=8, S=5)

    def sharded(devices, interpret, **options):
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
        def step(q, k, v, q_scale, k_scale):
            scales = {"q_scale": q_scale, "k_scale": k_scale}
            return qk_norm_rope(q, k, v, **scales, implementation="pallas", interpret=interpret)
        batch, shared = P("data"), P()
        specs = (batch, batch, batch, shared, shared)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=batch, **options)
        return lambda *xs: mapped(*xs[:5])

    def check(call):
        found = oracle.excesses(case, *calls.with_gradients(call, case))
        assert max(found.values()) <= 1, found

    check(sharded(8, True))
    check(sharded(8, True, check_vma=False))
    check(sharded(1, pltpu.InterpretParams()))
    print("all checked")
"""


@pytest.mark.slow
def test_shard_map_over_the_batch_on_eight_devices():
    """With the default checks and without; compiled: see `test_compile`, four-devices."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "all checked\n", done.stderr
