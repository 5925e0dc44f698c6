"""`smalti estimate tune`, with made-up times; once with the compiler."""

import json
import re
import shlex
import time

import pytest

from smalti import block_table
from smalti.block_table import attention_class
from smalti.cli import tune_run
from smalti.estimate import CompilerMissing
from smalti.estimate.tune import Trial
from tests.support.libtpu import needs_libtpu

SHAPE = "B=1,Hq=8,Hkv=8,S=2048,D=128"
LABEL = "estimate; made up"


class Measure:
    """Smaller blocks are slower, and 2048 does not fit."""

    def __init__(self):
        self.seen = []
        self.stop_at: int | None = None
        self.raises: Exception | None = None

    def __call__(self, variant, chip: str) -> Trial:
        if self.raises is not None:
            raise self.raises
        if len(self.seen) == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append(dict(variant.blocks))
        if 2048 in variant.blocks.values():
            return Trial(reason=f"VMEM is exhausted on {chip}")
        cycles = 1e9 / (variant.blocks["block_q"] * variant.blocks["block_kv"])
        cycles += variant.blocks.get("block_kv_compute", 0)
        return Trial(cycles=cycles, time_ns=cycles / 1.75, bytes_hbm=1 << 20, bound="MXU")


@pytest.fixture
def measure(monkeypatch):
    fake = Measure()
    monkeypatch.setattr(tune_run, "measure", fake)
    monkeypatch.setattr(tune_run, "label_of", lambda *_: LABEL)
    return fake


@pytest.fixture
def tune(smalti, tmp_path, measure):
    """`tune(…)` searches splash in this process, into `table.json`."""

    def run(*options, subject="splash", shape=SHAPE, table=tmp_path / "table.json"):
        common = ("--shape", shape, "--table", table, "--jobs", 1)
        return smalti("estimate", "tune", subject, *common, *options)

    return run


def entries(tmp_path):
    return block_table.load(tmp_path / "table.json")


def test_ours_are_tuned_as_the_peers_are(tune, tmp_path):
    done = tune("--pass", "backward", subject="ours")
    assert done.code == 0
    (entry,) = entries(tmp_path)
    assert entry["blocks"] == {"block_q": 512, "block_kv": 1024}
    assert entry["same"]["pass"] == "backward"
    assert (entry["candidates"], entry["missed"]) == (4, 0)
    done = tune("--pass", "both", subject="ours")
    assert done.code == 2
    assert "ours has blocks for forward and for backward; tune each" in done.line


def test_the_best_goes_to_the_table_with_where_it_comes_from(tune, tmp_path):
    done = tune("--chip", "v5e")
    assert done.code == 0
    (entry,) = entries(tmp_path)
    date, versions = entry.pop("date"), entry.pop("versions")
    assert time.strptime(date, "%Y-%m-%d")
    assert versions["jax"].count(".") >= 2
    assert {"jax", "jaxlib", "smalti"} <= versions.keys()
    assert entry["blocks"] == {"block_q": 1024, "block_kv": 1024, "block_kv_compute": 256}
    assert entry["runner_up"]["blocks"]["block_kv_compute"] == 512
    assert entry["cycles"] == round(1e9 / 1024**2 + 256)
    assert entry["label"] == LABEL
    assert entry["candidates"] == entry["tried"] > entry["missed"] > 0
    assert entry["searched"]["Sq"] == 2048
    assert entry["command"] == (
        "smalti estimate tune splash --chip v5e --shape B=1,Hq=8,Hkv=8,Sq=2048,Sk=2048,D=128,Dv=128"
        " --pass forward --mask causal --dtype bfloat16"
    )
    sizes = {"Hq": 16, "Hkv": 16, "Sq": 1900, "Sk": 1900, "D": 100}
    near = attention_class(which="forward", dtype="bfloat16", mask="causal", **sizes)
    found = block_table.find(entries(tmp_path), kernel="splash", chip="v5e", shape_class=near)
    assert found == entries(tmp_path)[0]


def test_the_command_of_an_entry_finds_it_again(tune, smalti, tmp_path):
    tune()
    (entry,) = entries(tmp_path)
    _, _, _, subject, *options = shlex.split(entry["command"])
    other = tmp_path / "other.json"
    again = smalti("estimate", "tune", subject, *options, "--table", other, "--jobs", 1)
    assert again.code == 0
    assert block_table.load(other) == [entry]


def test_the_screen_shows_the_best_first_and_why_others_are_missed(tune):
    done = tune()
    rows = [line for line in done.out.splitlines() if line.startswith("│")]
    assert "1,210" in rows[0]
    assert "block_q=1024 block_kv=1024 block_kv_compute=256" in rows[0]
    assert "1.212" in rows[1]
    assert LABEL in done.out
    assert "candidates: VMEM is exhausted on v6e" in done.out
    assert done.out.count("VMEM is exhausted") == 1
    assert done.err.splitlines()[-1].startswith("done: ")


def test_few_rows_are_shown_unless_all_are_asked_for(tune, monkeypatch):
    monkeypatch.setattr("smalti.cli.tune._SHOWN", 3)
    few, all_of_them = tune(), tune("--verbose")
    assert "and 7 slower ones: --verbose shows all" in few.out
    assert "--verbose shows" not in all_of_them.out
    assert few.out.count("│\n") == 3
    assert all_of_them.out.count("│\n") == 10


def test_a_budget_is_extended_by_the_next_command(tune, measure, tmp_path):
    done = tune("--candidates", 2)
    assert len(measure.seen) == 2
    assert "the budget is spent: 2 of " in done.err
    assert entries(tmp_path)[0]["tried"] == 2
    tune("--candidates", 5)
    assert len(measure.seen) == 5
    tune("--minutes", 1)
    assert len(measure.seen) == entries(tmp_path)[0]["candidates"]


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(tune, measure, tmp_path):
    measure.stop_at = 3
    stopped = tune()
    assert stopped.code == 130
    (line,) = stopped.err.splitlines()
    assert line.startswith("smalti: stopped: 3 of ")
    assert line.endswith("table.json; the same command goes on from there")
    assert entries(tmp_path)[0]["tried"] == 3
    measure.stop_at = None
    assert tune().code == 0
    (entry,) = entries(tmp_path)
    assert entry["tried"] == entry["candidates"] == len(measure.seen)


def test_ctrl_c_before_the_first_result_writes_no_table(tune, measure, tmp_path):
    measure.stop_at = 0
    stopped = tune()
    assert stopped.code == 130
    assert "smalti: stopped: of " in stopped.err
    assert not (tmp_path / "table.json").exists()


def test_a_torn_journal_is_said_and_searched_again(tune, measure, tmp_path):
    tune("--candidates", 3)
    journal = tmp_path / "table.json.journal"
    journal.write_bytes(journal.read_bytes()[:-20])
    done = tune("--candidates", 3)
    assert done.code == 0
    assert "one line cannot be read and will be searched again" in done.err
    assert len(measure.seen) == 4
    assert measure.seen[2] == measure.seen[3]


def test_another_version_is_searched_again_what_was_best_first(
    tune, measure, tmp_path, monkeypatch
):
    tune()
    best = entries(tmp_path)[0]
    measure.seen.clear()
    monkeypatch.setattr(tune_run, "versions_now", lambda: {"jax": "9.9.9"})
    tune("--candidates", 2)
    assert measure.seen == [best["blocks"], best["runner_up"]["blocks"]]
    (entry,) = entries(tmp_path)
    assert entry["blocks"] == best["blocks"]
    assert entry["versions"] == {"jax": "9.9.9"}


def test_another_source_is_searched_again(tune, measure, monkeypatch):
    tune("--candidates", 2)
    monkeypatch.setattr(tune_run, "_source", lambda: "other")
    tune("--candidates", 2)
    assert len(measure.seen) == 4


def test_each_class_has_its_entry_and_others_stay(tune, tmp_path):
    tune("--candidates", 1)
    tune("--candidates", 1, "--mask", "full")
    tune("--candidates", 1, "--mask", "sliding_window(512)")
    tune("--candidates", 1, "--pass", "backward")
    tune("--candidates", 1, "--dtype", "float32")
    tune("--candidates", 1, shape="B=1,Hq=8,Hkv=2,S=8192,D=64")
    assert len(entries(tmp_path)) == 6
    before = (tmp_path / "table.json").read_bytes()
    tune("--candidates", 1)
    assert (tmp_path / "table.json").read_bytes() == before


def test_all_missed_is_no_answer_and_writes_no_table(tune, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_run, "measure", lambda variant, chip: Trial(reason="it is too large"))
    done = tune("--candidates", 2)
    assert done.code == 1
    assert "2 candidates: it is too large" in done.out
    assert re.fullmatch(
        r"the budget is spent: of \d+ candidates 2 were tried, and none gave an estimate; "
        r"the first reason: it is too large",
        done.line,
    )
    assert not (tmp_path / "table.json").exists()


def test_a_case_that_a_peer_refuses_says_why(smalti, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_run, "label_of", lambda *_: LABEL)
    common = ("--shape", SHAPE, "--table", tmp_path / "table.json", "--jobs", 1)
    done = smalti("estimate", "tune", "jax_flash", *common, "--mask", "sliding_window(512)")
    assert done.code == 1
    assert done.line.endswith("the first reason: flash_attention has no sliding window")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"subject": "splahs"},
            "SUBJECT: unknown subject 'splahs'; known: ours, splash, .*'splash'",
        ),
        ({"shape": "B=1,Hq=8"}, "shape: Hkv, Sq, Sk, D missing"),
        ({"subject": "matmul"}, "--shape 'B=1.*: matmul's is M=1024,K=1024,N=1024"),
        ({"subject": "matmul", "shape": "M=0,K=1,N=1"}, "matmul's is M=1024,K=1024,N=1024"),
        (("--chip", "v6"), "chip 'v6' is not known.*did you mean v6e"),
        (("--pass", "forwrd"), "--pass: unknown pass 'forwrd'.*did you mean 'forward'"),
        (("--mask", "casual"), "mask: unknown value 'casual'.*did you mean 'causal'"),
        (("--dtype", "float16"), "dtype: unknown value 'float16'"),
        (("--candidates", 0), "--candidates 0: at least 1"),
        (("--minutes", 0), "--minutes 0: more than 0"),
        (("--jobs", 0), "--jobs 0: at least 1"),
    ],
)
def test_a_wrong_command_is_said_before_the_work(tune, measure, options, said):
    done = tune(**options) if isinstance(options, dict) else tune(*options)
    assert done.code == 2
    assert re.search(said, done.line), done.line
    assert measure.seen == []


@pytest.mark.parametrize(("option", "value"), [("--pass", "forward"), ("--mask", "full")])
def test_matmul_takes_no_options_of_attention(tune, option, value):
    done = tune(option, value, subject="matmul", shape="M=512,K=512,N=512")
    assert (done.code, done.line) == (2, f"{option}: matmul has none; leave it out")


def test_a_place_that_cannot_be_written_is_said_before_the_work(tune, measure, tmp_path):
    nowhere = tune(table=tmp_path / "nowhere" / "table.json")
    assert nowhere.code == 2
    assert "cannot be written" in nowhere.line
    assert "No such file or directory" in nowhere.line
    folder = tune(table=tmp_path)
    assert folder.code == 2
    assert "cannot be read: Is a directory" in folder.line
    assert measure.seen == []


def test_a_damaged_table_is_said_before_the_work_and_kept(tune, measure, tmp_path):
    (tmp_path / "table.json").write_text('{"schema": 1, "entr')
    done = tune()
    assert done.code == 2
    assert "restore it, or delete it and tune again" in done.line
    assert measure.seen == []
    assert (tmp_path / "table.json").read_text() == '{"schema": 1, "entr'


def test_what_every_candidate_would_meet_ends_the_search(tune, measure):
    measure.raises = CompilerMissing("libtpu, the TPU compiler, is not installed")
    done = tune()
    assert (done.code, done.line) == (1, "libtpu, the TPU compiler, is not installed")


@needs_libtpu
@pytest.mark.slow
def test_a_product_is_tuned_for_real(smalti, tmp_path, monkeypatch):
    """By two processes, which make the candidates anew."""
    monkeypatch.setattr(tune_run, "label_of", lambda *_: LABEL)
    table = tmp_path / "table.json"
    common = ("--shape", "M=512,K=512,N=512", "--chip", "v6e", "--table", table, "--jobs", 2)
    done = smalti("estimate", "tune", "matmul", *common, "--candidates", 3)
    assert done.code == 0, done.err
    (entry,) = block_table.load(table)
    assert (entry["tried"], entry["missed"]) == (3, 0)
    assert set(entry["blocks"].values()) <= {256, 512}
    # 512³ multiply-adds on a 256×256 unit that takes two rows a cycle.
    assert 512**3 / 256**2 / 2 < entry["cycles"] <= entry["runner_up"]["cycles"] < 20_000
    journal = (tmp_path / "table.json.journal").read_text().splitlines()
    assert len({json.dumps(json.loads(line)["key"]["blocks"]) for line in journal}) == 3
