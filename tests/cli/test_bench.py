"""`smalti estimate bench`, with made-up times; once with the compiler."""

import inspect
import json

import pytest

from smalti.cli import bench as command
from smalti.cli import bench_cases, bench_run
from smalti.cli.bench_cases import OURS, PEERS, Asked, tasks
from smalti.estimate import EstimateError
from smalti.estimate.tune import Trial
from tests.support.libtpu import needs_libtpu
from tests.support.tokamax import needs_tokamax

pytestmark = needs_tokamax
ONE = ("--chips", "v6e", "--dims", 128, "--lengths", 2048)
TIMES = {OURS: 60_000.0, "tokamax": 100_000.0, "splash": 120_000.0, "jax_flash": 150_000.0}
NOT_YET = "the kernels are not part of this version"


def trial(time_ns: float) -> Trial:
    return Trial(
        cycles=time_ns * 1.75,
        time_ns=time_ns,
        bytes_hbm=1 << 20,
        bound="MXU",
        kernels_time_ns=time_ns * 0.9,
        occupancy={"MXU": 0.7, "EUP": 0.4},
        vmem_bytes=1 << 20,
    )


class Measure:
    """Takes `TIMES`, more by every variant of a peer; may refuse ours, or be stopped."""

    def __init__(self):
        self.seen: list[str] = []
        self.refuses_ours = False
        self.stop_at: int | None = None

    def __call__(self, variant, chip: str) -> Trial:
        if len(self.seen) == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append(variant.peer)
        assert variant.flags == ("--xla_tpu_scoped_vmem_limit_kib=32768",)
        if variant.peer == OURS and self.refuses_ours:
            return Trial(reason=NOT_YET)
        return trial(TIMES[variant.peer] + 1000 * self.seen.count(variant.peer))


@pytest.fixture
def measure(monkeypatch):
    fake = Measure()
    monkeypatch.setattr(bench_run, "measure", fake)
    return fake


@pytest.fixture
def bench(smalti, tmp_path, measure):
    """`bench(…)` works in this process, and writes a.json, a.png and a.journal."""

    def run(*options):
        files = [f"--{name}={tmp_path / f'a.{name}'}" for name in ("json", "journal")]
        chart = f"--chart={tmp_path / 'a.png'}"
        return smalti("estimate", "bench", "--jobs", 1, *files, chart, *options)

    return run


def record(tmp_path):
    return json.loads((tmp_path / "a.json").read_text())


def test_a_table_a_record_and_a_chart(bench, tmp_path):
    done = bench(*ONE)
    assert done.code == 0, done.err
    found = record(tmp_path)
    assert [(r["pass"], r["Hkv"]) for r in found["rows"]] == [
        *(("forward", 8), ("forward", 2)),
        *(("both", 8), ("both", 2)),
    ]
    first = found["rows"][0]
    assert first["best_peer"] == "tokamax"
    assert first["ratio"] == pytest.approx(61 / 101)
    assert found["flags"] == ["--xla_tpu_scoped_vmem_limit_kib=32768"]
    assert found["versions"]["jax"]
    assert found["known"] == found["tasks"] == len(tasks(Asked(("v6e",), (128,), (2048,))))
    for text in ("forward on v6e", "fwd+bwd on v6e", "61/55", "101*/91", "≤ 0.75: met"):
        assert text in done.out
    assert found["labels"]["v6e"]["forward"] in " ".join(done.out.split())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_our_kernels_the_peers_still_show(bench, measure, tmp_path):
    measure.refuses_ours = True
    done = bench(*ONE)
    assert done.code == 0
    (row, *_) = record(tmp_path)["rows"]
    assert row["ours"] is row["ratio"] is None
    assert row["reasons"] == {OURS: NOT_YET}
    assert f"ours: none for 4 of 4 shapes, because {NOT_YET}" in done.out
    assert "≤ 0.75: open" in done.out
    assert ": met" not in done.out


def test_stopped_and_started_again_it_goes_on(bench, measure, tmp_path):
    measure.stop_at = 7
    done = bench(*ONE)
    assert done.code == 130
    assert done.err.splitlines()[-1].startswith("smalti: stopped")
    assert "incomplete: 7 of " in done.out
    assert record(tmp_path)["known"] == 7
    assert "not compiled yet" in done.out
    measure.stop_at, before = None, list(measure.seen)
    again = bench(*ONE)
    assert again.code == 0
    assert "7 of " in again.err
    assert len(measure.seen) == record(tmp_path)["tasks"]
    assert measure.seen[:7] == before
    bench(*ONE)
    assert len(measure.seen) == record(tmp_path)["tasks"]


def test_json_alone_on_stdout(smalti, measure, tmp_path):
    files = (f"--journal={tmp_path / 'j'}", f"--chart={tmp_path / 'a.svg'}", "--json=-")
    done = smalti("estimate", "bench", *ONE, "--variants", 1, "--jobs", 1, *files)
    assert json.loads(done.out)["kind"] == "bench"
    assert measure.seen.count("tokamax") == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--chips", "v6"), "did you mean v6e?"),
        (("--dims", "80"), "--dims: 80 is none of 64, 128, 256; --full-grid takes any"),
        (("--dims", "wide"), "--dims 'wide' is not whole numbers joined by commas"),
        (("--lengths", "0"), "--lengths: 0 is less than 1"),
        (("--kv-heads", "3"), "--kv-heads: 3 is none of 1, 2, 4, 8"),
        (("--passes", "backward"), "--passes: backward is none of forward, both"),
        (("--variants", "0"), "--variants: 0 is less than 1"),
        (("--jobs", "0"), "--jobs 0: at least 1"),
        (("--chart", "a.bmp"), "--chart a.bmp: the name ends in"),
        (("--journal", "no/such/journal"), "cannot be written: No such file"),
    ],
)
def test_a_wrong_argument_is_one_line_before_the_work(bench, measure, options, expected):
    done = bench(*options)
    assert done.code == 2
    assert expected in done.line
    assert done.out == ""
    assert measure.seen == []


def test_without_a_peer_there_is_no_best_one(bench, measure, monkeypatch):
    def missing(peer, *_):
        raise EstimateError(f"peer {peer} is not installed: pip install {peer}")

    bench_cases.tasks.cache_clear()
    monkeypatch.setattr(bench_cases, "attention_variants", missing)
    done = bench(*ONE)
    bench_cases.tasks.cache_clear()
    assert done.code == 1
    assert done.line == "peer tokamax is not installed: pip install tokamax"
    assert measure.seen == []


def test_the_commands_defaults_are_all_there_is():
    """Written twice, since the command line imports nothing that takes time."""
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(command.bench).parameters.items()
    }
    asked = Asked()
    for name in ("chips", "dims", "lengths", "kv_heads", "passes"):
        assert given[name] == ",".join(map(str, getattr(asked, name)))


@pytest.mark.slow
@needs_libtpu
def test_end_to_end(smalti, tmp_path):
    """The real compiler, for one small shape."""
    done = smalti(
        *("estimate", "bench", "--chips", "v6e", "--dims", 128, "--lengths", 512),
        *("--kv-heads", 2, "--passes", "forward", "--variants", 1, "--jobs", 1, "--json=-"),
        *(f"--journal={tmp_path / 'j'}", f"--chart={tmp_path / 'a.png'}"),
    )
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    for name in PEERS:
        found = row["peers"][name]
        assert found["kernels_time_ns"] <= found["time_ns"]
        assert row["floor"]["time_ns"] < found["time_ns"]
        assert found["vmem_bytes"] > 0
        assert 0 < found["occupancy"]["MXU"] < 1
    assert row["ours"] or row["reasons"][OURS]
