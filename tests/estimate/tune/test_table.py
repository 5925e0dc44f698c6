"""From a search to an entry, into a table, onto the disk."""

import pytest

from smalti import block_table
from smalti.estimate.tune import entry_of, merged
from tests.estimate.tune import fake


def entry(tmp_path, **changed):
    found = fake.run(tmp_path / "j", fake.Measure())
    return entry_of(
        found,
        **{
            "kernel": "fake",
            "chip": "v6e",
            "same": {"dtype": "bfloat16"},
            "near": {"S": 2048},
            "searched": {"S": 2000},
            "label": "estimate; made up",
            "versions": {"jax": "1"},
            "date": "2026-01-01",
            "command": "smalti estimate tune fake",
            **changed,
        },
    )


def test_an_entry_holds_the_best_and_where_it_comes_from(tmp_path):
    assert entry(tmp_path) == {
        "kernel": "fake",
        "chip": "v6e",
        "same": {"dtype": "bfloat16"},
        "near": {"S": 2048},
        "blocks": {"block": 1024},
        "flags": [],
        "cycles": 200,
        "time_ns": 114,
        "label": "estimate; made up",
        "runner_up": {"blocks": {"block": 128}, "cycles": 200},
        "candidates": 5,
        "tried": 5,
        "missed": 1,
        "searched": {"S": 2000},
        "versions": {"jax": "1"},
        "date": "2026-01-01",
        "command": "smalti estimate tune fake",
    }


def test_a_single_candidate_has_no_runner_up(tmp_path):
    found = fake.run(tmp_path / "other", fake.Measure(), first=1)
    made = entry_of(
        found,
        kernel="fake",
        chip="v6e",
        same={},
        near={},
        searched={},
        label="",
        versions={},
        date="",
        command="",
    )
    assert made["runner_up"] is None
    assert (made["candidates"], made["tried"], made["missed"]) == (5, 1, 0)


def test_a_search_without_a_result_makes_no_entry(tmp_path):
    found = fake.run(tmp_path / "j", fake.Measure())
    found.trials = {2: found.trials[2]}
    with pytest.raises(ValueError, match="no candidate has an estimate"):
        entry_of(
            found,
            kernel="",
            chip="",
            same={},
            near={},
            searched={},
            label="",
            versions={},
            date="",
            command="",
        )


def test_merging_replaces_what_serves_the_same_and_keeps_the_rest(tmp_path):
    first = entry(tmp_path)
    others = [
        entry(tmp_path, chip="v5e"),
        entry(tmp_path, kernel="another"),
        entry(tmp_path, same={"dtype": "float32"}),
        entry(tmp_path, near={"S": 4096}),
    ]
    new = entry(tmp_path, versions={"jax": "2"})
    result = merged([first, *others], new)
    assert len(result) == 5
    assert new in result
    assert first not in result
    assert all(other in result for other in others)


def test_an_equal_result_changes_nothing(tmp_path):
    old = entry(tmp_path)
    again = entry(tmp_path, date="2027-02-02", command="smalti estimate tune fake --chip v6e")
    assert block_table.dump(merged([old], again)) == block_table.dump([old])
    newer = entry(tmp_path, date="2027-02-02", versions={"jax": "2"})
    assert merged([old], newer) == [newer]
