"""metrics.jsonl after kills, the picture, and the optional trackers."""

import contextlib
import json
import sys
import types
from pathlib import Path

import pytest

from nanogpt_jax.config import UserError
from nanogpt_jax.metrics import JsonLines, check_sinks, open_sinks, plot_losses, read_records
from nanogpt_jax.run_folder import WriteError

from .conftest import tiny_config


def record(step, **values):
    return {"step": step, "train_loss": 1 / 3, "val_loss": None, **values}


def write(path, *records):
    with contextlib.closing(JsonLines(path)) as lines:
        for each in records:
            lines.log(each)


def test_floats_are_whole_and_lines_are_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.log(record(1, train_loss=0.1 + 0.2))
    assert json.loads(path.read_text()) == record(1, train_loss=0.30000000000000004)
    lines.close()


@pytest.mark.parametrize("torn", ["", '{"step": 4, "train_lo', '{"step": 4}', "\x00\x00"])
def test_going_on_removes_later_and_torn_records(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, *map(record, (1, 2, 3)))
    with path.open("a") as file:
        file.write(torn)
    lines = JsonLines(path, last_step=2)
    lines.log(record(3, train_loss=7.0))
    lines.close()
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    assert list(read_records(path))[-1]["train_loss"] == 7.0
    assert list(tmp_path.iterdir()) == [path]


def test_a_foreign_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, record(1))
    with path.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is no record; remove that line"):
        JsonLines(path, 3)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"step": 1, "val_loss": null}\n', "line 1 is no record"),
        (b'{"step": "1", "train_loss": 1.0, "val_loss": null}\n', "step must be an integer"),
        (b'{"step": 1, "train_loss": "1", "val_loss": null}\n', "and the losses numbers"),
        (b"\xff\n", "cannot be read: 'utf-8' codec"),
        (None, "cannot be read: [Errno 21] Is a directory"),
    ],
)
def test_what_is_no_record_is_one_line(tmp_path, content, text):
    path = tmp_path / "metrics.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        JsonLines(path, 3)
    assert str(error.value).startswith(f"{path}: ")
    assert text in str(error.value)


def test_a_full_disk_is_one_line():
    """/dev/full is a device that has no room, ever."""
    lines = JsonLines.__new__(JsonLines)
    lines._path = Path("/dev/full")
    with lines._path.open("a", encoding="utf-8") as lines._file:
        for action in (lambda: lines.log(record(1)), lines.close):
            with pytest.raises(WriteError, match="cannot write /dev/full: No space left on dev"):
                action()


def test_nan_is_no_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path / "metrics.jsonl", record(1, train_loss=float("nan")))


@pytest.mark.parametrize("val_loss", [None, 0.5])
def test_the_picture(tmp_path, val_loss):
    write(tmp_path / "metrics.jsonl", record(1), record(2, val_loss=val_loss))
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("key", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_missing_package_is_one_line(monkeypatch, key, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as error:
        check_sinks(tiny_config(f"logging.{key}=true"))
    assert str(error.value) == (
        f"logging.{key}: got true, but the package {package} is not installed; install it with "
        f"`pip install 'smalti[{key}]'`, or set logging.{key} to false"
    )
    check_sinks(tiny_config())


class FakeTracker:
    """Stands for tensorboardX's SummaryWriter, and for wandb's module and run."""

    def __init__(self, *args, **kwargs):
        self.opened, self.logged, self.closed = (args, kwargs), [], False

    def add_scalar(self, name, value, step):
        self.logged.append((name, value, step))

    def log(self, values, step):
        self.logged += [(name, value, step) for name, value in values.items()]

    def close(self):
        self.closed = True

    finish = close


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_trackers_get_the_numbers_that_are_there(tmp_path, monkeypatch, name):
    trackers = []

    def make(*args, **kwargs):
        trackers.append(FakeTracker(*args, **kwargs))
        return trackers[-1]

    module = types.SimpleNamespace(init=make, SummaryWriter=make)
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), module)
    for sink in open_sinks(tiny_config(f"logging.{name}=true"), tmp_path, 4):
        sink.log(record(5, mfu=None))
        sink.close()
    (tracker,) = trackers
    assert ("train_loss", 1 / 3, 5) in tracker.logged
    assert "val_loss" not in {key for key, _, _ in tracker.logged}
    assert tracker.closed
    args, kwargs = tracker.opened
    if name == "tensorboard":
        assert (args, kwargs) == ((str(tmp_path / "tensorboard"),), {"purge_step": 5})
    else:
        assert kwargs["name"] == tmp_path.name
        assert kwargs["resume"] == "allow"
        assert kwargs["config"]["model"]["dim"] == 16
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == 1
