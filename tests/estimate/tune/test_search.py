"""The search over made-up candidates: order, misses, budgets, and going on after a stop."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from smalti.estimate import EstimateError
from smalti.estimate.tune import Trial
from tests.estimate.tune import fake


def blocks_of(pairs) -> list[int]:
    return [variant.blocks["block"] for variant, _ in pairs]


def test_the_least_cycles_come_first_and_ties_keep_the_order_of_promise(tmp_path):
    found = fake.run(tmp_path / "j", fake.Measure())
    assert blocks_of(found.ranked) == [1024, 128, 256, 512]
    assert [trial.cycles for _, trial in found.ranked] == [200, 200, 250, 300]


def test_a_miss_keeps_its_reason_and_stops_nothing(tmp_path):
    found = fake.run(tmp_path / "j", fake.Measure())
    assert blocks_of(found.missed) == [2048]
    assert found.missed[0][1].reason == "VMEM is exhausted on v6e"
    assert len(found.trials) == 5


def test_candidates_are_tried_in_the_grid_s_order(tmp_path):
    measure = fake.Measure()
    fake.run(tmp_path / "j", measure)
    assert measure.places == [0, 1, 2, 3, 4]


def test_the_same_search_again_measures_nothing(tmp_path):
    first = fake.run(tmp_path / "j", fake.Measure())
    again = fake.Measure()
    second = fake.run(tmp_path / "j", again)
    assert again.places == []
    assert second.remembered == 5
    assert second.trials == first.trials


def test_other_versions_are_searched_again(tmp_path):
    fake.run(tmp_path / "j", fake.Measure(), version="1")
    again = fake.Measure()
    fake.run(tmp_path / "j", again, version="2")
    assert again.places == [0, 1, 2, 3, 4]


def test_a_miss_of_the_machine_is_tried_again(tmp_path):
    def measure(place: int) -> Trial:
        return Trial(reason="died of SIGKILL", lasting=False) if place == 1 else fake.trial(place)

    found = fake.run(tmp_path / "j", measure)
    assert blocks_of(found.missed) == [1024, 2048]
    again = fake.Measure()
    assert blocks_of(fake.run(tmp_path / "j", again).ranked)[0] == 1024
    assert again.places == [1]


def test_a_number_of_candidates_is_a_budget_that_the_next_search_extends(tmp_path):
    measure = fake.Measure()
    found = fake.run(tmp_path / "j", measure, first=2)
    assert measure.places == [0, 1]
    assert sorted(found.trials) == [0, 1]
    again = fake.Measure()
    fake.run(tmp_path / "j", again, first=4)
    assert again.places == [2, 3]


def test_another_order_is_kept_and_budgets_count_along_it(tmp_path):
    measure = fake.Measure()
    found = fake.run(tmp_path / "j", measure, order=[4, 0, 3, 2, 1], first=3)
    assert measure.places == [4, 0, 3]
    assert blocks_of(found.ranked) == [128, 256, 512]


def test_what_is_known_counts_beyond_the_budget(tmp_path):
    fake.run(tmp_path / "j", fake.Measure())
    found = fake.run(tmp_path / "j", fake.Measure(), first=1)
    assert len(found.trials) == 5


def test_no_candidate_is_begun_after_the_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    measured = fake.Measure()

    def measure(place: int) -> Trial:
        now[0] += 10.0
        return measured(place)

    found = fake.run(tmp_path / "j", measure, seconds=25.0)
    assert measured.places == [0, 1, 2]  # the third began at 20 s
    assert not found.interrupted


def test_ctrl_c_ends_it_with_what_is_known(tmp_path):
    found = fake.run(tmp_path / "j", fake.Measure({2: KeyboardInterrupt()}))
    assert found.interrupted
    assert sorted(found.trials) == [0, 1]
    again = fake.Measure()
    assert not fake.run(tmp_path / "j", again).interrupted
    assert again.places == [2, 3, 4]


def test_what_measuring_raises_passes_through_and_the_journal_keeps_the_rest(tmp_path):
    with pytest.raises(EstimateError, match="the disk is full"):
        fake.run(tmp_path / "j", fake.Measure({3: EstimateError("the disk is full")}))
    again = fake.Measure()
    fake.run(tmp_path / "j", again)
    assert again.places == [3, 4]


def test_progress_is_told_of_all_that_is_done(tmp_path):
    fake.run(tmp_path / "j", fake.Measure(), first=2)
    totals, seen = [], []
    fake.run(
        tmp_path / "j",
        fake.Measure(),
        first=4,
        on_start=totals.append,
        on_trial=lambda variant: seen.append(variant.blocks["block"]),
    )
    assert totals == [4]
    assert seen == [512, 1024, 2048, 256]


def start(what: str, path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.estimate.tune.fake", what, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_killed_search_goes_on(tmp_path):
    with start("killed", tmp_path / "j") as process:
        assert process.wait(60) == -signal.SIGKILL
    again = fake.Measure()
    found = fake.run(tmp_path / "j", again)
    assert again.places == [2, 3, 4]
    assert blocks_of(found.ranked) == [1024, 128, 256, 512]


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_at_once(tmp_path):
    with start("slow", tmp_path / "j") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        # The second process begins its next one when the first candidate is in the journal.
        deadline = time.monotonic() + 60
        while not (tmp_path / "j").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, _ = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "interrupted True [0]"
    (line,) = (tmp_path / "j").read_text().splitlines()
    assert json.loads(line)["key"]["blocks"] == {"block": 512}


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1])
def test_a_second_ctrl_c_ends_it_too(tmp_path, pause_s):
    """While the first is ending the processes, which must not wait for work that never comes."""
    with start("slow", tmp_path / "j") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(pause_s)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)  # returns when every process has closed its output
