import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from smalti.chips import TENSOR_CORES
from smalti.estimate import compile_for
from smalti.estimate import self_test as module
from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.self_test import TESTED, self_test
from tests.support.libtpu import needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
def test_the_installed_compiler_writes_what_is_read(cache, chip):
    found = self_test(chip, cache)
    assert found.chip == chip
    assert len(found.checks) == 6
    assert found.tested == ((found.versions["jax"], found.versions["libtpu"]) in TESTED)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda d: replace(d, bundles=d.bundles.replace("exit bundle", "last bundle")),
            "the dump ends before its exit bundle; it is cut short",
        ),
        (
            lambda d: replace(d, utilization=d.utilization.replace("SALU", "SALU, NEW")),
            "the utilisation file has the units",
        ),
        (
            lambda d: replace(d, bundles=d.bundles.replace("region", "area")),
            "which the dump does not hold; it is damaged, or of a libtpu whose format is not known",
        ),
        (
            lambda d: replace(d, bundles=d.bundles.replace("sadd.s32", "sadd.i32")),
            "holds the operation 'sadd.i32', which is not known",
        ),
        (
            lambda d: replace(d, bundles=re.sub(r'loc\("', 'at("', d.bundles)),
            "source lines: 0 source lines, of which none is the kernel's",
        ),
    ],
)
def test_another_format_fails_loudly(cache, monkeypatch, change, expected):
    real = module.compile_for

    def other(*args, **options):
        program = real(*args, **options)
        return replace(
            program, kernels={name: change(dump) for name, dump in program.kernels.items()}
        )

    monkeypatch.setattr(module, "compile_for", other)
    with pytest.raises(DumpUnreadable, match=re.escape(expected)) as caught:
        self_test("v6e", cache)
    assert str(caught.value).startswith("the self-test on v6e with jax ")
    assert "tested with jax 0.10.2, libtpu 0.0.42.1 and jax 0.12.0.1, libtpu 0.0.50.1" in str(
        caught.value
    )


@pytest.mark.parametrize("chip", list(TENSOR_CORES))
def test_the_clock_is_what_the_compiler_takes_it_for(chip, cache):
    """`pl.delay` is of nanoseconds; the compiler turns them into cycles."""

    def kernel(x_ref, o_ref):
        pl.delay(1000)
        o_ref[...] = x_ref[...]

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    program = compile_for(pl.pallas_call(kernel, out_shape=x), x, chip=chip, cache_dir=cache)
    (dump,) = program.kernels.values()
    cycles = [int(n) for n in re.findall(r"vdelay (\d+)", dump.bundles)]
    assert cycles == [round(TENSOR_CORES[chip].clock_hz * 1e-6)]
