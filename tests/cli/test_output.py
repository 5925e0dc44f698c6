import importlib.util
import json
from pathlib import Path

import pytest

from smalti.cli import output
from smalti.cli.failing import Failed
from tests.estimate.report import records


def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path):
    missing = tmp_path / "no" / "such.json"
    with pytest.raises(ValueError, match=r"--json .*such\.json cannot be written: No such file"):
        output.check(missing, None)
    with pytest.raises(ValueError, match=r"--chart .*\.png cannot be written: No such file"):
        output.check(None, missing.with_suffix(".png"))
    with pytest.raises(ValueError, match="cannot be written: Is a directory"):
        output.check(tmp_path, None)
    with pytest.raises(ValueError, match=r"--chart out\.jpg: the name ends in \.png or \.svg"):
        output.check(None, Path("out.jpg"))


def test_checking_leaves_files_as_they_are(tmp_path):
    kept = tmp_path / "a.json"
    kept.write_text("kept")
    output.check(kept, tmp_path / "b.png")
    assert kept.read_text() == "kept"
    assert not (tmp_path / "b.png").exists()
    output.check(output.STDOUT, None)


def test_a_chart_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Failed, match=r'--chart needs matplotlib: pip install "smalti\[cli\]"'):
        output.check(None, tmp_path / "a.png")


def test_json_to_stdout_and_to_a_file(tmp_path, capsys):
    output.write(records.fn(), output.STDOUT, None)
    printed = json.loads(capsys.readouterr().out)
    output.write(records.fn(), tmp_path / "a.json", None)
    assert json.loads((tmp_path / "a.json").read_text()) == printed
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'a.json'}\n")


def test_a_file_that_cannot_be_written_after_all(tmp_path):
    with pytest.raises(Failed, match=r"a\.json could not be written: No such file"):
        output.write(records.fn(), tmp_path / "gone" / "a.json", None)
