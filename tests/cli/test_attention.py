import json

import pytest

from smalti.cli import search
from smalti.estimate import CompileFailed
from smalti.estimate.compile.lowering import lower
from smalti.estimate.compile.target import find_target
from tests.estimate.report.programs import program
from tests.support.libtpu import needs_libtpu

SHAPE = "B=1,Hq=1,Hkv=1,S=256,D=128"
ENTRY = {"cycles", "time_ns", "bytes_hbm", "bound", "occupancy", "ratio_to_best_peer"}


@pytest.fixture
def compiles(monkeypatch):
    """In place of the compiler: lowers for real, and takes what a fixture was compiled to."""

    def compile_for(fn, *args, chip, flags):
        name = lower(fn, args, find_target(chip)).name.removesuffix("_forward")
        if name == "splash":
            raise CompileFailed("VMEM is exhausted on v6e")
        return program(name)

    monkeypatch.setattr(search, "compile_for", compile_for)


def attention(smalti, *arguments, against="jax_flash,xla", shape=SHAPE):
    jobs = ("--jobs", 1, "--variants", 1)
    return smalti(
        "estimate", "attention", "--shape", shape, "--against", against, *jobs, *arguments
    )


def test_a_table_a_record_and_a_chart(smalti, compiles, tmp_path, monkeypatch):
    def refuse(*arrays, **options):
        raise NotImplementedError(f"implementation={options['implementation']!r}: not here")

    monkeypatch.setattr("smalti.attention", refuse)
    json_file, chart = tmp_path / "a.json", tmp_path / "a.svg"
    run = attention(
        smalti, "--json", json_file, "--chart", chart, "--source", against="splash,jax_flash,xla"
    )
    assert run.code == 0, run.err
    record = json.loads(json_file.read_text())
    assert record["ours"] is None
    assert "implementation='pallas'" in record["reasons"]["ours"]
    assert list(record["peers"]) == ["splash", "jax_flash", "xla"]
    assert record["peers"]["splash"] is None
    assert record["reasons"]["splash"] == "VMEM is exhausted on v6e"
    for name in ("jax_flash", "xla"):
        found = record["peers"][name]
        assert found.keys() >= ENTRY
        assert found["label"] == record["label"]
        assert name in run.out
    assert min(record["peers"][n]["ratio_to_best_peer"] for n in ("jax_flash", "xla")) == 1
    assert record["label"].startswith("estimate; ")
    assert run.out.count(record["label"]) >= 2
    assert "ours: none, because implementation='pallas'" in run.out
    assert "flash_attention.py:" in run.out
    assert "<svg" in chart.read_text()


def test_json_alone_on_stdout(smalti, compiles):
    assert json.loads(attention(smalti, "--json", "-").out)["kind"] == "attention"


def test_no_estimate_at_all_is_a_failure(smalti, compiles):
    run = attention(smalti, against="splash")
    assert run.code == 1
    assert run.line == "no variant gave an estimate"
    assert "splash: none, because VMEM is exhausted on v6e" in run.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--mask", "casual"), "did you mean 'causal'?"),
        (("--pass", "foward"), "did you mean forward?"),
        (("--pass", "FORWARD"), "did you mean forward?"),
        (("--layout", "bhsd"), "did you mean 'BHSD'?"),
        (("--layout", "BHS"), "did you mean 'BHSD'?"),
        (("--dtype", "float16"), "unknown value 'float16'; known: bfloat16, float32"),
        (("--chip", "v6"), "did you mean v6e?"),
        (("--variants", 0), "--variants 0: at least 1"),
        (("--jobs", 0), "--jobs 0: at least 1"),
        (("--against", "splsh"), "--against: 'splsh' is none of tokamax, splash, jax_flash, xla"),
        (("--chart", "a.bmp"), "--chart a.bmp: the name ends in"),
        (("--shape", "B=1,Hq=3,Hkv=2,S=8,D=8"), "Hq=3 is not a multiple of Hkv=2"),
        (("--shape", "B=1"), "shape: Hq, Hkv, Sq, Sk, D missing"),
    ],
)
def test_a_wrong_argument_is_one_line_before_the_work(smalti, monkeypatch, arguments, expected):
    monkeypatch.setattr(search, "search", lambda *_, **__: pytest.fail("the work was begun"))
    run = attention(smalti, *arguments)
    assert run.code == 2
    assert run.out == ""
    assert expected in run.line


@pytest.mark.slow
@needs_libtpu
def test_end_to_end(smalti):
    """The real compiler, twice at a time."""
    run = smalti(
        *("estimate", "attention", "--chip", "v6e", "--shape", "B=1,Hq=2,Hkv=2,S=512,D=128"),
        *("--against", "jax_flash,xla", "--variants", 1, "--jobs", 2, "--json", "-"),
    )
    assert run.code == 0, run.err
    record = json.loads(run.out)
    (kernel,) = record["ours"]["lowered"]["kernels"]
    assert kernel.partition(".")[0] == "smalti_attention_forward"
    flash, xla = record["peers"]["jax_flash"], record["peers"]["xla"]
    assert flash["lowered"]["kernels"]
    assert xla["lowered"]["kernels"] == []
    # q, k, v in and the result out, at least once each.
    assert flash["bytes_hbm"] >= 4 * 2 * 512 * 128 * 2
    for kernel in flash["kernels"]:
        lines = sum(line["cycles"] for line in kernel["lines"])
        assert lines == pytest.approx(kernel["cycles"])
        assert any(line["text"] for line in kernel["lines"])
