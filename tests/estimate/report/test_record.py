import json

import pytest

from smalti.estimate.report import entries_of, read_record, record_text
from tests.estimate.report import records

KEYS = {"cycles", "time_ns", "bytes_hbm", "bound", "occupancy", "ratio_to_best_peer"}
KEYS |= {"variant", "flags", "versions", "label", "assumptions", "kernels"}


def test_attention_has_ours_and_peers_with_all_keys():
    record = json.loads(record_text(records.attention()))
    assert record["ours"] is None
    assert record["reasons"]["ours"] == "no kernels yet"
    assert record["peers"]["splash"] is None
    assert record["peers"]["xla"].keys() >= KEYS
    flash, xla = record["peers"]["jax_flash"], record["peers"]["xla"]
    best = min(flash["cycles"], xla["cycles"])
    assert flash["ratio_to_best_peer"] == flash["cycles"] / best
    assert xla["ratio_to_best_peer"] == xla["cycles"] / best
    assert list(entries_of(record)) == ["jax_flash", "xla"]


def test_fn_is_one_entry_with_operations_and_lines():
    record = json.loads(record_text(records.fn()))
    assert KEYS - {"ratio_to_best_peer", "variant"} <= record.keys()
    assert record["args"] == ["f32[512,128]"]
    assert [op["kind"] for op in record["ops"]] == ["kernel", "xla"]
    assert record["kernels"][0]["lines"]


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(record_text(records.fn()), encoding="utf-8")
    assert read_record(path) == records.fn() | {"date_utc": read_record(path)["date_utc"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, r"a\.json cannot be read: No such file"),
        ("[" * 100_000, r"a\.json is no JSON \(.*\); give a file that --json wrote"),
        ("{", r"a\.json is no JSON \(.*\); give a file that --json wrote"),
        ("[]", r"a\.json is no record of `smalti estimate`"),
        ('{"kind": "fn", "schema": 7}', r"has the format 7, and this version reads 1"),
    ],
)
def test_other_files_are_refused(tmp_path, text, expected):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_record(path)
