"""Files that are replaced whole."""

import errno
import os
import stat
import threading

import pytest

from smalti.files import write_whole


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "table.json"
    write_whole(path, "one")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    write_whole(path, "two – 2")
    assert path.read_text(encoding="utf-8") == "two – 2"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_write_that_fails_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_whole(path, "one")

    def fails(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no"):
        write_whole(path, "two")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_what_a_link_leads_to_is_replaced(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_name_may_be_as_long_as_the_folder_takes(tmp_path):
    path = tmp_path / ("a" * 250 + ".json")
    write_whole(path, "1")
    assert path.read_text() == "1"


def test_a_pipe_stays_one(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "read")
    reader.join(timeout=60)
    assert found == ["read"]
    assert pipe.is_fifo()


def test_a_folder_that_takes_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("older and longer")

    def refused(**_):
        raise PermissionError("no")

    monkeypatch.setattr("tempfile.mkstemp", refused)
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_a_file_that_is_mounted_by_itself(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def busy(*_):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "replace", busy)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
