"""Kernels that libtpu compiles here and now, against what can be counted by hand."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from smalti.chips import TENSOR_CORES
from smalti.estimate import compile_for, simulate
from smalti.estimate.errors import Unstated
from smalti.estimate.module import read_module, schedule
from tests.support.libtpu import needs_libtpu

from .. import kernels
from ..kernels import TABLE, Shape, X

pytestmark = [pytest.mark.slow, needs_libtpu]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


def simulated(fn, shapes, chip, cache, operands=None, **options):
    """The simulations of a program's kernels, by op name."""
    program = compile_for(fn, *shapes, chip=chip, cache_dir=cache, **options)
    listed = schedule(read_module(program.hlo), bytes_per_cycle=1.0, overlap="full")
    core = TENSOR_CORES[chip]
    return {
        op.name: simulate(program.kernels[op.name], core, operands or op.operands)
        for op in listed.kernels
    }


def in_parallel(call, cases):
    """Each compilation is a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(lambda case: call(*case), cases), strict=True))


def runs_of(simulation, opcode):
    """How often the bundles ran that hold such an operation; a copy of it moved up counts less."""
    return {
        int(simulation.executions[bundle.address])
        for bundle in simulation.listing.bundles
        for operation in bundle.operations
        if operation.opcode.startswith(opcode)
    }


BITS = sum(int(entry).bit_length() for entry in TABLE)
BEFORE = np.cumsum(TABLE) - TABLE
CONTROL_FLOW = {
    "sum_of_table": int(TABLE.sum()),
    "halving": BITS,
    "nested": int(((TABLE > 2) & (TABLE % 2 == 0)).sum()),
    "divided": sum((7 * i + 5) // (e + 3) > 2 and (7 * i + 5) % (e + 3) > 0
                   for i, e in enumerate(TABLE.tolist())),
    "counted_zeros": int((TABLE < 4).sum()),
    "remembered": int((BEFORE < TABLE).sum()),
}  # fmt: skip
SCRATCH = {"remembered": (pltpu.SMEM((1,), jnp.int32),)}


def test_control_flow_by_tables(cache):
    """`out += 1` runs as often as the table implies: the least often run addition is the one."""

    def case(name, chip):
        fn = kernels.with_table(getattr(kernels, name), scratch=SCRATCH.get(name, ()))
        (found,) = simulated(fn, (X,), chip, cache).values()
        return min(runs_of(found, "vadd.f32"))

    # v7x moves short bodies into delay slots, where they take their bundles in any case.
    loops = ("sum_of_table", "halving", "counted_zeros", "remembered")
    cases = [(name, "v6e") for name in CONTROL_FLOW] + [(name, "v7x") for name in loops]
    cases += [(name, chip) for name in ("nested", "divided") for chip in ("v4", "v5e", "v5p")]
    found = in_parallel(case, cases)
    assert found == {(name, chip): CONTROL_FLOW[name] for name, chip in cases}


def test_copies_and_semaphores_of_the_kernels_own(cache):
    def case(name, chip):
        fn = {
            "double": kernels.double_buffer(),
            "signal": kernels.with_table(
                kernels.signalling, scratch=(pltpu.SemaphoreType.REGULAR,)
            ),
        }[name]
        (found,) = simulated(fn, (X,), chip, cache).values()
        return found.bytes.get("hbm_to_vmem", 0), found.bytes["vmem_to_hbm"]

    whole = 1024 * 128 * 4
    cases = [(name, chip) for name in ("double", "signal") for chip in ("v5e", "v6e", "v7x")]
    found = in_parallel(case, cases)
    # v7x holds X in VMEM.
    assert found == {case: (0 if case[1] == "v7x" else whole, whole) for case in cases}


def test_a_pipeline_in_a_kernel_and_a_dynamic_grid(cache):
    def pipeline(x):
        def outer(x, out):
            def inner(x, out):
                out[...] = x[...] * 3

            block = pl.BlockSpec((128, 128), lambda i: (i, 0))
            pltpu.emit_pipeline(inner, grid=(8,), in_specs=[block], out_specs=[block])(x, out)

        anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.pallas_call(outer, out_shape=X, in_specs=[anywhere], out_specs=anywhere)(x)

    (found,) = simulated(pipeline, (X,), "v6e", cache).values()
    assert found.bytes == {"hbm_to_vmem": 1024 * 128 * 4, "vmem_to_hbm": 1024 * 128 * 4}

    def dynamic(x, steps):
        def kernel(x, out):
            out[...] = x[...] * 2

        block = pl.BlockSpec((128, 128), lambda i: (i, 0))
        return pl.pallas_call(
            kernel, out_shape=X, grid=(steps,), in_specs=[block], out_specs=block
        )(x)

    shapes = (X, Shape((), jnp.int32))
    for steps in (1, 5, 8):
        (found,) = simulated(
            dynamic, shapes, "v6e", cache, operands=[np.int32(steps), None]
        ).values()
        assert found.copies == {"hbm_to_vmem": steps, "vmem_to_hbm": steps}
    with pytest.raises(Unstated, match="operand 0, a scalar whose value is not stated"):
        simulated(dynamic, shapes, "v6e", cache)


def test_a_branch_on_a_vector_is_stated_by_the_caller(cache):
    def kernel(table, x, out):
        out[...] = x[...] * 2

        @pl.when(jnp.sum(x[...]) > 0)
        def _():
            out[...] *= 3

    program = compile_for(kernels.with_table(kernel), X, chip="v6e", cache_dir=cache)
    ((name, dump),) = program.kernels.items()
    core = TENSOR_CORES["v6e"]
    with pytest.raises(Unstated, match=f"^{name}, block at .* a number in floating point, from"):
        simulate(dump, core, [TABLE, None])
    branches = [int(line, 16) for line in re.findall(r"\n +(0x\w+) .*sbr\.rel", dump.bundles)]
    counts = []
    for at in branches:
        try:
            found = simulate(dump, core, [TABLE, None], {at: [True, False] * 4})
        except Unstated:
            continue
        counts.append(found.copies["vmem_to_hbm"])
    assert counts == [8]


SMEM_SHAPES = [(513,), (3, 5), (1, 4, 4), (9, 130)]


def test_where_scalars_stand_in_smem(cache):
    """The kernel counts the elements that it finds in their places."""

    def case(shape, dtype, chip):
        fn, shapes, table = kernels.table_reader(shape, dtype)
        (found,) = simulated(fn, shapes, chip, cache, operands=[table, None]).values()
        (other,) = simulated(fn, shapes, chip, cache, operands=[(table + 1) % 101, None]).values()
        return min(runs_of(found, "vadd.f32")), min(runs_of(other, "vadd.f32"))

    cases = [(shape, dtype, "v6e") for shape in SMEM_SHAPES for dtype in ("int32", "int8")]
    cases += [((9, 130), "int16", "v6e"), ((513,), "int16", "v6e"), ((2, 3, 9, 20), "int8", "v6e")]
    # Not v7x: it moves the addition into the delay slots, where it takes its bundle in any case.
    cases += [((9, 130), "int32", "v5e"), ((9, 130), "int8", "v5e")]
    found = in_parallel(case, [(shape, np.dtype(dtype), chip) for shape, dtype, chip in cases])
    expected = {
        (shape, np.dtype(dtype), chip): (int(np.prod(shape)), 0) for shape, dtype, chip in cases
    }
    assert found == expected


def test_a_table_whose_rows_come_with_the_steps(cache):
    """Each step of the grid gets a row of its own: how many products it takes."""
    lists = np.array([3, 0, 7, 2], np.int32).reshape(4, 1, 1)

    def fn(x):
        def kernel(row, x, out):
            out[...] = x[...]

            def body(i, carry):
                out[...] += 1.0
                return carry

            jax.lax.fori_loop(0, row[0, 0], body, 0)

        block = pl.BlockSpec((128, 128), lambda i: (i, 0))
        rows = pl.BlockSpec((None, 1, 1), lambda i: (i, 0, 0), memory_space=pltpu.SMEM)
        return pl.pallas_call(
            kernel, out_shape=X, grid=(4,), in_specs=[rows, block], out_specs=block
        )(jnp.asarray(lists), x)

    cases = [(fn, (X,), chip, cache) for chip in ("v4", "v5e", "v6e", "v7x")]
    for found in in_parallel(simulated, cases).values():
        (kernel,) = found.values()
        assert int(lists.sum()) in kernel.executions


# (M, K, N), blocks, how often A's, B's and the result's blocks are copied.
MATMULS = [
    ((512, 1024, 512), (256, 512, 256), 8, 8, 4),
    ((512, 512, 1024), (512, 512, 256), 1, 4, 4),  # A stays, as i and k do
    ((1024, 512, 512), (256, 256, 512), 8, 8, 4),
    ((1024, 512, 512), (256, 512, 512), 4, 1, 4),  # B stays, as k and j do
]
MXU = {"v4": 128, "v5e": 128, "v6e": 256}


def test_a_matmul_copies_and_multiplies_what_its_blocks_say(cache):
    def case(number, chip):
        size, blocks, *_ = MATMULS[number]
        fn, shapes = kernels.matmul(size, blocks)
        (found,) = simulated(fn, shapes, chip, cache).values()
        products = sum(
            int(found.executions[bundle.address])
            for bundle in found.listing.bundles
            for operation in bundle.operations
            if operation.opcode.startswith("vmatmul")
        )
        return found.bytes, found.copies, products * 16 * MXU[chip] ** 2

    cases = [(number, chip) for number in range(len(MATMULS)) for chip in MXU]
    for (number, chip), (bytes_, copies, products) in in_parallel(case, cases).items():
        (m, k, n), (bm, bk, bn), a, b, out = MATMULS[number]
        assert copies == {"hbm_to_vmem": a + b, "vmem_to_hbm": out}, (number, chip)
        assert bytes_ == {
            "hbm_to_vmem": 2 * (a * bm * bk + b * bk * bn),
            "vmem_to_hbm": 4 * out * bm * bn,
        }, (number, chip)
        assert products == m * k * n, (number, chip)


def live_tiles(mask, block):
    q, k = (size // block for size in mask.shape)
    return int(mask.reshape(q, block, k, block).any(axis=(1, 3)).sum())


@pytest.mark.parametrize(("seq", "block"), [(1024, 256), (1024, 128)])
def test_flash_attention_runs_the_live_tiles_of_a_causal_mask(cache, seq, block):
    names = ("block_q", "block_k_major", "block_k", "block_q_major_dkv", "block_k_major_dkv")
    names += ("block_k_dkv", "block_q_dkv", "block_k_major_dq", "block_k_dq", "block_q_dq")
    sizes = BlockSizes(**dict.fromkeys(names, block), block_b=1)
    flash = functools.partial(flash_attention, causal=True, block_sizes=sizes)

    def both(q, k, v, dout):
        out, backward = jax.vjp(flash, q, k, v)
        return out, backward(dout)

    shapes = (Shape((1, 2, seq, 128), jnp.bfloat16),) * 4
    found = simulated(both, shapes, "v6e", cache)
    assert len(found) == 3
    live = 2 * live_tiles(np.tri(seq, dtype=bool), block)
    for name, simulation in found.items():
        assert runs_of(simulation, "vmatmul") == {live}, name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["causal", "local"])
def test_splash_attention_runs_the_live_tiles_of_its_mask(cache, kind, fused):
    seq, block = 1024, 256
    if kind == "causal":
        one, mask = masks.CausalMask((seq, seq)), np.tri(seq, dtype=bool)
    else:
        one = masks.LocalMask((seq, seq), (200, 0), 0)
        mask = np.tri(seq, dtype=bool) & ~np.tri(seq, k=-201, dtype=bool)
    options = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block)
    if not fused:
        options |= {"block_q_dq": block, "block_kv_dq": block}
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        use_fused_bwd_kernel=fused,
        **options,
    )
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([one] * 2), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )

    def both(q, k, v, dout):
        out, backward = jax.vjp(kernel, q, k, v)
        return out, backward(dout)

    found = simulated(both, (Shape((2, seq, 128), jnp.bfloat16),) * 4, "v6e", cache)
    assert len(found) == (2 if fused else 3)
    live = 2 * live_tiles(mask, block)
    for name, simulation in found.items():
        assert runs_of(simulation, "vmatmul") == {live}, name


def test_the_static_profile_of_libtpu_agrees_on_a_loop(cache, tmp_path):
    """By what more rounds cost: it prices the copies around them in its own way."""

    def turning(rounds):
        def kernel(x, out):
            out[...] = lax.fori_loop(0, rounds, lambda _, v: jnp.sin(v) * 2 + 1, x[...])

        in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        shape = Shape((64, 128), jnp.float32)
        return (
            lambda x: pl.pallas_call(
                kernel, out_shape=shape, in_specs=[in_vmem], out_specs=in_vmem
            )(x)
        ), (shape,)

    for chip in ("v5e", "v6e", "v7x"):
        ours, theirs = {}, {}
        for rounds in (10, 110):
            folder = tmp_path / f"{chip}-{rounds}"
            folder.mkdir()
            flags = [f"--xla_jf_dump_static_llo_profile_to={folder}"]
            fn, shapes = turning(rounds)
            (found,) = simulated(fn, shapes, chip, cache, flags=flags).values()
            ours[rounds] = found.cycles
            (profile,) = folder.glob("*_static_llo_profile.textproto")
            theirs[rounds] = int(re.findall(r"estimated_cycles: (\d+)", profile.read_text())[0])
        ratio = (ours[110] - ours[10]) / (theirs[110] - theirs[10])
        # It charges a few cycles more a round, for results that a round begins by waiting for.
        assert 0.9 < ratio <= 1, (chip, ratio)
