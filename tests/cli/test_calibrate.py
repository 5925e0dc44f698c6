"""`smalti estimate calibrate`: what it prints and writes; predictions are tested elsewhere."""

import json
from dataclasses import replace

import pytest

from smalti.estimate.calibrate.report import assess
from tests.estimate.calibrate.test_calibrate import SUBJECTS


@pytest.fixture
def predicted(monkeypatch):
    long = "tokamax block_q=1024 block_kv=512 q_layout=HEAD_DIM_MINOR heads=mqa"
    subjects = [replace(SUBJECTS[0], variant=long), *SUBJECTS[1:]]
    result = assess(subjects, {"another": "tokamax is not installed"}, {"libtpu": "1.2"})
    monkeypatch.setattr("smalti.estimate.calibrate.calibrate", lambda progress: result)
    return result


def test_a_table_and_a_record(smalti, predicted, tmp_path):
    run = smalti("estimate", "calibrate", "--json", tmp_path / "c.json")
    assert run.code == 0
    assert "tokamax 1024/512" in run.out
    assert "not predicted: another: tokamax is not installed" in run.out
    assert f"median absolute error {predicted.median_abs_error:.1%}" in run.out
    assert "with libtpu 1.2" in run.out
    record = json.loads((tmp_path / "c.json").read_text())
    assert [row["id"] for row in record["rows"]] == [row.id for row in predicted.rows]
    assert record["median_abs_error"] == predicted.median_abs_error
    assert record["label"] == "estimates"


def test_json_alone_goes_to_stdout(smalti, predicted):
    run = smalti("estimate", "calibrate", "--json", "-")
    assert json.loads(run.out)["worst_abs_error"] == predicted.worst_abs_error


def test_a_file_that_cannot_be_written_is_said_before_the_work(smalti, monkeypatch, tmp_path):
    monkeypatch.setattr("smalti.estimate.calibrate.calibrate", lambda *_: pytest.fail("worked"))
    run = smalti("estimate", "calibrate", "--json", tmp_path / "no" / "c.json")
    assert run.code == 2
    assert "cannot be written" in run.line
