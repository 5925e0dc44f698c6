"""The journal: what is written is found, whatever else is in the file."""

import pytest

from smalti.estimate.tune import Journal, Trial

HIT = Trial(cycles=10.5, time_ns=6.0, bytes_hbm=12, bound="MXU")
MISS = Trial(reason="VMEM is exhausted – 16 MiB")
KEY = {"blocks": {"block_q": 512}, "versions": {"jax": "1"}}
OTHER = {"blocks": {"block_q": 1024}, "versions": {"jax": "1"}}


def test_what_is_added_is_found_by_another_process(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    journal.add(KEY, HIT)
    journal.add(OTHER, MISS)
    assert journal.find(KEY) == HIT
    again = Journal(path)
    assert again.find(KEY) == HIT
    assert again.find(OTHER) == MISS
    assert again.unreadable == 0


def test_the_order_of_a_key_s_names_does_not_matter(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.add(KEY, HIT)
    assert journal.find(dict(reversed(KEY.items()))) == HIT


def test_any_part_of_the_key_counts(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.add(KEY, HIT)
    assert journal.find({**KEY, "versions": {"jax": "2"}}) is None


def test_the_last_of_two_trials_counts(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.add(KEY, MISS)
    journal.add(KEY, HIT)
    assert Journal(tmp_path / "j").find(KEY) == HIT


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_a_torn_last_line_is_ignored_and_spoils_no_other(tmp_path, cut):
    path = tmp_path / "j"
    journal = Journal(path)
    journal.add(KEY, HIT)
    whole = path.read_bytes()
    journal.add(OTHER, MISS)
    both = path.read_bytes()
    path.write_bytes(both[: len(whole) + cut])
    torn = Journal(path)
    assert torn.find(KEY) == HIT
    assert torn.find(OTHER) is None
    assert torn.unreadable == 1
    torn.add(OTHER, MISS)
    healed = Journal(path)
    assert healed.find(KEY) == HIT
    assert healed.find(OTHER) == MISS


def test_a_line_that_lacks_only_its_end_is_read(tmp_path):
    path = tmp_path / "j"
    Journal(path).add(KEY, HIT)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    journal = Journal(path)
    assert journal.find(KEY) == HIT
    journal.add(OTHER, MISS)
    assert Journal(path).find(OTHER) == MISS
    assert Journal(path).find(KEY) == HIT


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{}",
        b"nonsense",
        b"\xff\xfe",
        b'{"key": {}, "trial": {"cycles": 1, "colour": "red"}}',
        b'{"key": {}, "trial": {}}',
        b'{"key": {}, "trial": 5}',
    ],
)
def test_a_damaged_line_is_counted(tmp_path, line):
    path = tmp_path / "j"
    path.write_bytes(line + b"\n")
    Journal(path).add(KEY, HIT)
    journal = Journal(path)
    assert journal.unreadable == 1
    assert journal.find(KEY) == HIT


def test_two_searches_write_to_one_journal(tmp_path):
    one, other = Journal(tmp_path / "j"), Journal(tmp_path / "j")
    one.add(KEY, HIT)
    other.add(OTHER, MISS)
    both = Journal(tmp_path / "j")
    assert both.find(KEY) == HIT
    assert both.find(OTHER) == MISS


def test_where_nothing_can_be_written_it_says_so_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "nowhere" / "j")
    with pytest.raises(IsADirectoryError):
        Journal(tmp_path)


@pytest.mark.parametrize("values", [{}, {"cycles": 1.0, "reason": "both"}])
def test_a_trial_has_cycles_or_a_reason(values):
    with pytest.raises(ValueError, match="a trial has cycles or a reason"):
        Trial(**values)
