"""`smalti estimate sparse`: what is compared with what, and the files of `bench` that it shares."""

import io
import json

import pytest
from rich.console import Console

from smalti.cli import bench_cases, bench_run, sparse
from smalti.cli.sparse import builds, key_of
from smalti.cli.sparse_cases import DENSE, MASKS, Asked, tasks
from smalti.cli.sparse_record import record_of, show
from smalti.estimate.tune import Trial
from tests.support.tokamax import needs_tokamax

pytestmark = needs_tokamax

ASKED = Asked(chips=("v6e",))
WINDOW = "sliding_window(512)"
# By peer, pass and whether the mask is causal, microseconds; of each peer the first is the best.
TIMES = {
    ("ours", "forward", True): 40, ("ours", "both", True): 140,
    ("ours", "forward", False): 10, ("ours", "both", False): 30,
    ("tokamax", "forward", True): 80, ("tokamax", "both", True): 170,
    ("splash", "forward", True): 90, ("splash", "both", True): 400,
    ("splash", "forward", False): 25, ("splash", "both", False): 85,
    ("xla", "forward", False): 300, ("xla", "both", False): 800,
}  # fmt: skip


def trials() -> dict[int, Trial]:
    found: dict[int, Trial] = {}
    seen = set()
    for place, task in enumerate(tasks(ASKED)):
        key = task.variant.peer, task.row.which, task.row.mask == DENSE
        slower = 1 if (task.row, task.variant.peer) not in seen else 2
        seen.add((task.row, task.variant.peer))
        time_ns = TIMES[key] * 1e3 * slower
        found[place] = Trial(cycles=time_ns, time_ns=time_ns, bound="MXU")
    return found


def row_of(record, length: int, mask: str) -> dict:
    (row,) = (r for r in record["rows"] if (r["S"], r["mask"]) == (length, mask))
    return row


def test_the_backward_is_what_both_take_beyond_the_forward_and_the_best_is_taken():
    row = row_of(record_of(ASKED, trials(), {}), 8192, WINDOW)
    assert row["time_ns"]["ours"] == {"forward": 10e3, "backward": 20e3}
    assert row["time_ns"]["splash"] == {"forward": 25e3, "backward": 60e3}
    # Forward, ours is the quickest dense kernel; backward, tokamax's.
    assert row["dense_time_ns"] == {"forward": 40e3, "backward": 90e3}
    assert row["dense_over_ours"] == {"forward": 4.0, "backward": 4.5}
    assert row["splash_over_ours"] == {"forward": 2.5, "backward": 3.0}
    assert row["xla_over_ours"] == {"forward": 30.0, "backward": 25.0}


def test_what_is_missing_is_no_number_and_has_its_reason():
    known = trials()
    for place, task in enumerate(tasks(ASKED)):
        if task.row.mask == WINDOW and task.variant.peer == "splash":
            known[place] = Trial(reason="it does not compile")
        if task.row.mask == WINDOW and task.variant.peer == "xla":
            del known[place]
    record = record_of(ASKED, known, {})
    row = row_of(record, 8192, WINDOW)
    assert row["splash_over_ours"] == row["xla_over_ours"] == {"forward": None, "backward": None}
    reasons = {(r["peer"], r["reason"]) for r in record["reasons"]}
    assert reasons == {("splash", "it does not compile"), ("xla", "not compiled yet")}
    out = io.StringIO()
    show(Console(file=out, width=160), record)
    assert f"incomplete: {len(known)} of {len(tasks(ASKED))} programs are known" in out.getvalue()
    assert json.loads(json.dumps(record)) == record


def test_every_mask_and_pass_is_there_once_with_ours_first():
    rows = [task.row for task in tasks(ASKED)]
    assert {(row.length, row.mask) for row in rows} == set(MASKS)
    for row in dict.fromkeys(rows):
        peers = [task.variant.peer for task in tasks(ASKED) if task.row == row]
        assert peers[0] == "ours"
        assert set(peers[1:]) == ({"tokamax", "splash"} if row.mask == DENSE else {"splash", "xla"})


def test_dense_rows_are_those_of_bench():
    """So that one journal serves both."""
    bench = {
        json.dumps(bench_run.key_of(task), sort_keys=True)
        for task in bench_cases.tasks(
            bench_cases.Asked(chips=("v6e",), dims=(128,), lengths=(2048, 8192), kv_heads=(8,))
        )
    }
    keys: dict[bool, list[str]] = {True: [], False: []}
    for task in tasks(ASKED):
        key = json.dumps(key_of(task), sort_keys=True)
        keys[task.row.mask == DENSE].append(key)
    assert set(keys[True]) <= bench
    assert not set(keys[False]) & bench
    every = keys[True] + keys[False]
    assert len(set(every)) == len(every)


def test_a_masked_program_is_measured_anew_where_what_builds_it_has_changed(monkeypatch):
    before = [(task, key_of(task)) for task in tasks(ASKED)]
    monkeypatch.setattr(sparse, "_built_by", lambda: "changed")
    for task, key in before:
        changed = key_of(task)
        if task.row.mask == DENSE:
            assert changed == key
        else:
            assert {k for k in key if changed[k] != key[k]} == {"built_by"}


def test_what_builds_a_masked_program():
    assert builds("cli/sparse_cases.py")
    assert builds("masks/runs.py")
    for name in ("cli/sparse_record.py", "attention/tpu/forward.py", "estimate/masks.py"):
        assert not builds(name)


def test_a_digest_is_of_the_chosen_files():
    everything = bench_run.digest_of(lambda name: True)
    masks = bench_run.digest_of(builds)
    assert masks == bench_run.digest_of(builds)
    assert len({everything, masks, bench_run.digest_of(lambda name: False)}) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--chips", "v6"], "v6"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
        (["--journal", "/nowhere/at/all/x.journal"], "--journal /nowhere/at/all/x.journal cannot"),
    ],
)
def test_bad_options_are_one_line(smalti, arguments, text):
    done = smalti("estimate", "sparse", *arguments)
    assert done.code == 2
    assert text in done.line
