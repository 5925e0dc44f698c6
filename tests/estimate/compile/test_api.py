import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from smalti.estimate.compile import compile_for
from smalti.estimate.errors import CompileFailed, CompilerMissing
from tests.support.libtpu import needs_libtpu

from .kernels import X, double, long_gather, scale_by_table


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    text = (
        'libtpu, the TPU compiler, is not installed: pip install "jax[tpu]" (Linux on x86-64; no '
        "TPU is needed)"
    )
    with pytest.raises(CompilerMissing, match=f"^{re.escape(text)}$"):
        compile_for(double, X)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"flags": "--a"},
            "flags is the string '--a'; it is a sequence of them: ('--a',)",
        ),
        (
            {"flags": ["xla_a"]},
            "flags holds 'xla_a'; each is one flag of libtpu without spaces, such as "
            "'--xla_tpu_scoped_vmem_limit_kib=65536'",
        ),
        (
            {"flags": ["--xla_jf_dump_to=/tmp"]},
            "flags holds '--xla_jf_dump_to=/tmp', which compile_for sets itself: leave it out",
        ),
        (
            {"timeout_s": 0},
            "timeout_s is 0; it must be a positive number of seconds",
        ),
        (
            {"chip": "v6"},
            "chip 'v6' is not known; it is one of v4, v5e, v5p, v6e, v7x; did you mean v6e?",
        ),
    ],
)
def test_wrong_arguments_are_named(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        compile_for(double, X, **options)


@needs_libtpu
def test_a_kernel_is_compiled_once_and_comes_from_the_cache_again(tmp_path, capfd):
    def compiled(**options):
        table = np.array([3, 1, 4, 1], np.int8)
        fn = jax.named_call(lambda x: scale_by_table(jnp.asarray(table, jnp.int32), x))
        return compile_for(fn, X, cache_dir=tmp_path, **options)

    program = compiled()
    assert (program.chip, program.topology, program.devices) == ("v6e", "v6e:2x2", 1)
    assert program.memory.arguments_bytes == program.memory.outputs_bytes == 512 * 128 * 4
    (kernel,) = program.kernels.values()
    assert f"%{kernel.op} = " in program.hlo
    assert "{3, 1, 4, 1}" in program.hlo
    assert "dma.hbm_to_smem" in kernel.bundles
    assert re.search(r'loc\("[^"]*kernels\.py":\d+:\d+', kernel.bundles)
    assert kernel.utilization.startswith("== CAPACTIY:")
    assert capfd.readouterr() == ("", "")

    assert not program.cached
    again = compiled()
    assert again.cached
    assert {**vars(again), "cached": False} == vars(program)
    (entry,) = (tmp_path / "programs").iterdir()
    entry.write_bytes(entry.read_bytes()[:-9])
    assert not compiled().cached


@needs_libtpu
def test_like_operations_keep_their_own_lines(tmp_path):
    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...]
        y = y_ref[...]
        o_ref[...] = x + y

    program = compile_for(pl.pallas_call(kernel, out_shape=X), X, X, cache_dir=tmp_path)
    (dump,) = program.kernels.values()
    loads = re.findall(r'= vld \[[^\]]*\] [^/{};]*/\* loc\("[^"]*":(\d+)', dump.bundles)
    first = kernel.__code__.co_firstlineno
    assert set(loads) == {str(first + 1), str(first + 2)}


@needs_libtpu
def test_too_large_blocks_and_a_flag_that_the_compiler_does_not_know(tmp_path):
    def fn(x):
        return double(x, rows=4096)

    large = jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    with ThreadPoolExecutor(2) as pool:
        blocks = pool.submit(compile_for, fn, large, cache_dir=tmp_path)
        flag = pool.submit(compile_for, fn, X, cache_dir=tmp_path, flags=["--xla_tpu_none=1"])
    with pytest.raises(CompileFailed) as caught:
        blocks.result()
    assert re.fullmatch(
        r"VMEM of \S+ is exhausted on v6e: the kernel needs 64.00M and its limit is [\d.]+M; take "
        r"smaller blocks, or raise the limit with "
        r"flags=\('--xla_tpu_scoped_vmem_limit_kib=65536',\) if the chip has that much",
        str(caught.value),
    )
    assert "RESOURCE_EXHAUSTED" in caught.value.compiler_message
    with pytest.raises(ValueError, match=r"^flags holds --xla_tpu_none, which libtpu \S+ does not"):
        flag.result()
    assert not (tmp_path / "programs").exists()


@needs_libtpu
def test_mosaic_refuses_a_gather(tmp_path):
    indices = jax.ShapeDtypeStruct(X.shape, jnp.int32)
    with pytest.raises(
        CompileFailed, match=r"^Mosaic, the compiler of Pallas kernels, refuses "
    ) as e:
        compile_for(long_gather, X, indices, cache_dir=tmp_path)
    assert "Not implemented: Multiple source vregs along gather dimension" in str(e.value)
    assert "tpu.dynamic_gather" in e.value.compiler_message


@needs_libtpu
@pytest.mark.slow
def test_every_chip_at_two_at_a_time(tmp_path):
    def compiled(chip):
        return compile_for(double, X, chip=chip, cache_dir=tmp_path)

    chips = ["v4", "v5e", "v5p", "v6e", "v7x"]
    with ThreadPoolExecutor(2) as pool:
        programs = list(pool.map(compiled, chips))
    assert [program.chip for program in programs] == chips
    assert len({program.kernels.popitem()[1].bundles for program in programs}) == 5


@needs_libtpu
@pytest.mark.slow
def test_kernels_in_a_scan_in_branches_and_alike(tmp_path):
    def fn(x):
        def step(x, _):
            return double(x, name="stepped"), None

        def branch(x):
            return double(double(x, name="twin"), name="twin")

        x = jax.lax.scan(step, x, None, length=7)[0]
        return jax.lax.cond(x[0, 0] > 0, branch, lambda x: double(x, name="twin"), x)

    program = compile_for(fn, X, cache_dir=tmp_path)
    names = re.findall(r'%(\S+) = .*custom_call_target="tpu_custom_call"', program.hlo)
    assert program.kernels.keys() == set(names)
    assert [name.partition(".")[0] for name in sorted(names)] == ["stepped", *["twin"] * 3]
    assert all(dump.bundles for dump in program.kernels.values())


@needs_libtpu
@pytest.mark.slow
def test_a_kernel_that_takes_its_inputs_computation_in(tmp_path):
    params = pltpu.CompilerParams(allow_input_fusion=[True])
    program = compile_for(
        lambda x: double(jnp.sin(x), name="k", compiler_params=params), X, cache_dir=tmp_path
    )
    (op,) = program.kernels
    assert re.search(rf"ROOT %{re.escape(op)} = .* fusion\(.*kind=kCustom", program.hlo)


@needs_libtpu
@pytest.mark.slow
def test_a_product_over_sixteen_chips(tmp_path):
    matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    def fn(x, w):
        def shard(x, w):
            return jax.lax.psum(jnp.sum(x @ w), "data")

        return jax.shard_map(shard, in_specs=(P("data"), P()), out_specs=P())(x, w)

    program = compile_for(
        fn,
        matrix,
        matrix,
        topology="v6e:4x4",
        mesh_axes={"data": 16},
        in_shardings=(P("data"), P("data")),
        cache_dir=tmp_path,
    )
    assert (program.topology, program.devices) == ("v6e:4x4", 16)
    assert program.memory.arguments_bytes == 2 * 4096 * 4096 * 2 // 16
    assert "all-gather" in program.hlo
    assert "all-reduce" in program.hlo
