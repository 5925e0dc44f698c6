"""The harness at a tiny size: it measures what it says. How fast anything is, this cannot say."""

import json

import pytest

from nanogpt_jax import decode_bench
from nanogpt_jax.decode_bench import main, table

from .conftest import arguments


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(decode_bench, "MARKS", (5, 20, 999))
    monkeypatch.setattr(decode_bench, "TURN", 2)


def test_a_text_its_marks_and_recomputation(small, tmp_path, capsys):
    path = tmp_path / "new" / "record.json"
    options = ["--num-tokens", "33", "--rounds", "3", "--vocab-size", "11", "--json", str(path)]
    assert main([*arguments(), *options]) == 0
    record = json.loads(path.read_text())
    assert [mark["tokens"] for mark in record["text"]] == [5, 20, 33]
    assert {mark["cache_bytes"] for mark in record["text"]} == {record["text"][0]["cache_bytes"]}
    assert [turn["tokens"] for turn in record["turns"]] == [5, 20, 33]
    assert all(len(turn["samples_s"]) == 3 for turn in record["turns"])
    assert record["recomputation"]["tokens"] == 16
    assert len(record["recomputation"]["samples_s"]) == 3
    assert record["cache"] == {"sinks": 0, "window": 16}
    assert record["config"]["training"]["seq_len"] == 16
    printed = capsys.readouterr().out.splitlines()
    assert printed == table(record)
    assert printed[0] == "a cache of the last 16 tokens"
    # Relative to the first mark at which the cache is full.
    assert printed[3].split("|")[3].strip() == "1.000"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--num-tokens", "0"), "error: --num-tokens: got 0; it must be at least 1"),
        (("--rounds", "-1"), "error: --rounds: got -1; it must be at least 1"),
        (
            (
                *("--override", "attention.impl=flex"),
                *("--override", "attention.mask=document(lengths=[10, 6]) & causal()"),
            ),
            "error: attention.mask: got 'document(lengths=[10, 6]) & causal()', which no cache of "
            "first and last tokens expresses; use causal(), sliding_window(…) or streaming(…)",
        ),
    ],
)
def test_what_is_refused(args, message, capsys):
    assert main([*arguments(), *args]) == 2
    out, err = capsys.readouterr()
    assert err == message + "\n"
    assert out == ""
