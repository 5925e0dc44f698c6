"""Two runs side by side."""

import json

import pytest

from nanogpt_jax.compare import main


def write_run(folder, losses, val_losses=None):
    folder.mkdir()
    records = [
        {"step": step, "train_loss": loss, "val_loss": (val_losses or {}).get(step)}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


def test_the_largest_difference_and_where(tmp_path, capsys):
    a = write_run(tmp_path / "a", [3.0] * 20, {10: 2.5, 20: 2.0})
    b = write_run(tmp_path / "b", [3.0] * 10 + [3.5] + [3.0] * 9, {10: 2.5, 20: 2.25})
    png = tmp_path / "curves.png"
    assert main([a, b, "--out", str(png)]) == 0
    out = capsys.readouterr().out
    assert "training loss up to step 2: largest difference 0.00e+00" in out
    assert "training loss up to step 20: largest difference 5.00e-01, at step 11" in out
    assert "validation loss up to step 20: largest difference 2.50e-01, at step 20" in out
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "text"),
    [("nothing", "no metrics.jsonl in it; name the folder of a run"), ("empty", "no record in it")],
)
def test_what_is_no_run(tmp_path, capsys, name, text):
    a = write_run(tmp_path / "a", [3.0])
    write_run(tmp_path / "empty", [])
    assert main([a, str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error


def test_a_picture_that_cannot_be_written(tmp_path, capsys):
    a = write_run(tmp_path / "a", [3.0], {1: 2.0})
    b = write_run(tmp_path / "b", [3.0], {1: 2.0})
    assert main([a, b, "--out", str(tmp_path / "no" / "such" / "x.png")]) == 2
    assert "--out: cannot write" in capsys.readouterr().err
