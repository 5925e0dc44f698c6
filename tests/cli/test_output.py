import importlib.util
import json
import os
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


@pytest.mark.parametrize("name", ["a.json", "a.png"])
def test_a_file_is_whole_even_where_writing_it_is_cut_short(tmp_path, monkeypatch, name):
    file = tmp_path / name
    json_file, chart = (file, None) if name.endswith("json") else (None, file)
    output.write(records.fn(), json_file, chart)
    before = file.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        output.write(records.fn(), json_file, chart)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--json .* cannot be written: File name too long; give"):
        output.check(tmp_path / ("a" * 300), None)


def test_checking_a_link_to_nowhere_keeps_the_link(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nowhere.json")
    output.check(link, None)
    assert [path.name for path in tmp_path.iterdir()] == ["link.json"]


def test_checking_a_pipe_does_not_end_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    output.check(pipe, None)
