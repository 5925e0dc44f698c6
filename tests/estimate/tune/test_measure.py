"""One candidate: what is a miss, and what ends the search."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.estimate import (
    CompileFailed,
    CompilerMissing,
    EstimateError,
    UnknownOperation,
    Unstated,
)
from smalti.estimate.compile.failures import explain
from smalti.estimate.compile.target import find_target
from smalti.estimate.peers import Variant, matmul_variant
from smalti.estimate.tune import Trial, measure
from tests.support.libtpu import needs_libtpu

MODULE = importlib.import_module("smalti.estimate.tune.measure")
ONE = (jax.ShapeDtypeStruct((8, 128), jnp.float32),)


def variant(**changed) -> Variant:
    return Variant("fake", {"block": 1}, "made up", lambda: (jnp.sin, ONE), **changed)


def estimated(*unpriced: str) -> SimpleNamespace:
    summary = SimpleNamespace(unpriced=tuple(SimpleNamespace(name=name) for name in unpriced))
    return SimpleNamespace(
        cycles=10,
        time_ns=5,
        bytes_hbm=7,
        bound="HBM",
        kernel_cycles=8,
        core=SimpleNamespace(clock_hz=2e9),
        occupancy={"MXU": np.float64(0.25), "HBM": 1},
        program=SimpleNamespace(hlo="a module"),
        schedule=SimpleNamespace(kernels=[SimpleNamespace(name=name) for name in ("k.1", "k.2")]),
        summary=summary,
    )


def raising(error: Exception):
    def fails(*_, **__):
        raise error

    return fails


def test_an_estimate_becomes_a_trial(monkeypatch):
    asked = {}

    def compiled(fn, *args, **settings):
        asked.update(settings, fn=fn, args=args)
        return "a program"

    result = estimated()
    monkeypatch.setattr(MODULE, "compile_for", compiled)
    monkeypatch.setattr(MODULE, "estimate", {"a program": result}.__getitem__)
    monkeypatch.setattr(MODULE, "read_module", lambda hlo: hlo)
    used = {"k.1": 100, "k.2": 300, "fusion.1": 900}
    monkeypatch.setattr(MODULE, "scoped_vmem_bytes", {"a module": used}.__getitem__)
    trial = measure(variant(flags=("--xla_a=1",)), "v5e")
    assert trial == Trial(
        cycles=10.0,
        time_ns=5.0,
        bytes_hbm=7,
        bound="HBM",
        kernels_time_ns=4.0,
        occupancy={"MXU": 0.25, "HBM": 1.0},
        vmem_bytes=300,
    )
    assert asked == {"fn": jnp.sin, "args": ONE, "chip": "v5e", "flags": ("--xla_a=1",)}


def test_a_lower_bound_is_a_miss(monkeypatch):
    monkeypatch.setattr(MODULE, "compile_for", lambda *_, **__: "a program")
    monkeypatch.setattr(MODULE, "estimate", lambda _: estimated("sort.1", "fft.2"))
    assert measure(variant(), "v6e") == Trial(
        reason="its cycles are a lower bound, which cannot be compared: 2 operations have no price "
        "(sort.1, fft.2)"
    )


def test_a_refused_candidate_is_a_miss():
    assert measure(variant(refused="it has no window"), "v6e") == Trial(reason="it has no window")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CompileFailed("VMEM is exhausted"), "VMEM is exhausted"),
        (NotImplementedError("not for\nD=80"), "not for D=80"),
        (ValueError("block_q must divide"), "ValueError: block_q must divide"),
        (AssertionError(), "AssertionError: it says nothing"),
    ],
)
def test_what_does_not_compile_is_a_miss(monkeypatch, error, reason):
    monkeypatch.setattr(MODULE, "compile_for", raising(error))
    assert measure(variant(), "v6e") == Trial(reason=reason)


def test_what_cannot_be_built_is_a_miss():
    broken = Variant("fake", {}, "made up", raising(ValueError("1000 is no multiple of 128")))
    assert measure(broken, "v6e").reason == "ValueError: 1000 is no multiple of 128"


@pytest.mark.parametrize("error", [UnknownOperation("vfoo"), Unstated("a trip count")])
def test_what_cannot_be_simulated_is_a_miss(monkeypatch, error):
    monkeypatch.setattr(MODULE, "compile_for", lambda *_, **__: "a program")
    monkeypatch.setattr(MODULE, "estimate", raising(error))
    assert measure(variant(), "v6e") == Trial(reason=str(error))


def test_a_fault_of_the_simulator_is_no_miss(monkeypatch):
    monkeypatch.setattr(MODULE, "compile_for", lambda *_, **__: "a program")
    monkeypatch.setattr(MODULE, "estimate", raising(KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        measure(variant(), "v6e")


@pytest.mark.parametrize(
    "error", [CompilerMissing("libtpu is not installed"), EstimateError("the disk is full")]
)
def test_what_every_candidate_would_meet_ends_the_search(monkeypatch, error):
    monkeypatch.setattr(MODULE, "compile_for", raising(error))
    with pytest.raises(type(error), match=str(error)):
        measure(variant(), "v6e")


def test_want_of_memory_does_not_last(monkeypatch):
    versions = {"jax": "1", "libtpu": "1"}
    killed = explain(find_target("v6e"), versions, {}, "", -9)
    monkeypatch.setattr(MODULE, "compile_for", raising(killed))
    assert not measure(variant(), "v6e").lasting
    died = explain(find_target("v6e"), versions, {}, "", -6)
    monkeypatch.setattr(MODULE, "compile_for", raising(died))
    assert measure(variant(), "v6e").lasting


@needs_libtpu
@pytest.mark.slow
def test_a_compilation_that_takes_too_long_does_not_last(monkeypatch):
    short = MODULE.compile_for

    def hasty(fn, *args, **settings):
        return short(fn, *args, timeout_s=0.01, **settings)

    monkeypatch.setattr(MODULE, "compile_for", hasty)
    trial = measure(Variant("fake", {}, "made up", lambda: (jnp.tan, ONE)), "v6e")
    assert "took longer than" in str(trial.reason)
    assert not trial.lasting


@needs_libtpu
@pytest.mark.slow
def test_real_blocks_come_to_an_estimate_or_do_not_fit():
    fits = measure(matmul_variant(512, 512, 512, bm=512, bk=512, bn=512), "v6e")
    # 512³ multiply-adds on a 256×256 unit that takes two rows a cycle, 1.5 MB of HBM at least.
    assert fits.cycles is not None
    assert 512**3 / 256**2 / 2 < fits.cycles < 20_000
    assert fits.bytes_hbm == 3 * 512 * 512 * 2
    assert fits.vmem_bytes is not None
    assert fits.vmem_bytes >= fits.bytes_hbm  # each block whole, and the sums
    assert fits.kernels_time_ns is not None
    assert fits.kernels_time_ns <= fits.time_ns
    assert fits.occupancy is not None
    assert 0 < fits.occupancy["MXU"] <= 1
    too_large = measure(matmul_variant(65536, 128, 128, bm=65536, bk=128, bn=128), "v6e")
    assert too_large.reason is not None
    assert "VMEM" in too_large.reason
    assert too_large.lasting
