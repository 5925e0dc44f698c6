import json
import os
import subprocess
import sys

import numpy as np
import pytest

from nanogpt_jax.data import prepare as module
from nanogpt_jax.data.dataset import load
from nanogpt_jax.data.prepare import prepare
from nanogpt_jax.data.shards import open_shard, write_shard


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written(tmp_path):
    out = tmp_path / "deep/out"
    manifest = prepare("sample", "byte", out, val_fraction=0.2, shard_tokens=4000)
    assert json.loads((out / "manifest.json").read_text()) == json.loads(json.dumps(manifest))
    assert names(out) == [
        "manifest.json",
        "tokenizer.json",
        "train_000000.bin",
        "train_000001.bin",
        "train_000002.bin",
        "val_000000.bin",
    ]
    assert manifest["source"] == "sample"
    assert manifest["val_fraction"] == 0.2
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("byte", 256)
    assert manifest["train"]["tokens"] + manifest["val"]["tokens"] == manifest["characters"]
    sizes = [open_shard(out / name).size for name in manifest["train"]["shards"]]
    assert sizes[:2] == [4000, 4000]
    assert sum(sizes) == manifest["train"]["tokens"]


def test_data_are_not_overwritten_unasked(tmp_path):
    prepare("sample", "byte", tmp_path, shard_tokens=1000)
    before = names(tmp_path)
    with pytest.raises(ValueError, match="holds prepared data already; use --overwrite"):
        prepare("sample", "char", tmp_path)
    assert names(tmp_path) == before
    (tmp_path / "notes.md").write_text("mine")
    prepare("sample", "char", tmp_path, overwrite=True)
    assert names(tmp_path) == [
        "manifest.json",
        "notes.md",
        "tokenizer.json",
        "train_000000.bin",
        "val_000000.bin",
    ]
    assert load(tmp_path).tokenizer.name == "char"


def test_foreign_shards_are_not_touched_unasked(tmp_path):
    write_shard(tmp_path / "fineweb_train_000001.bin", np.array([1], np.uint16))
    with pytest.raises(ValueError, match=r"already \(unfinished, or of another tool\)"):
        prepare("sample", "char", tmp_path)
    assert names(tmp_path) == ["fineweb_train_000001.bin"]


@pytest.mark.parametrize("writes", range(5))
@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_run_never_reads_as_whole(tmp_path, monkeypatch, writes, again):
    """Killed before its first, second … file; there are five."""
    if again:
        prepare("sample", "byte", tmp_path, shard_tokens=4000)
    done = 0

    def stop(write):
        def stopping(*args):
            nonlocal done
            if done == writes:
                raise KeyboardInterrupt
            done += 1
            write(*args)

        return stopping

    monkeypatch.setattr(module, "write_atomic", stop(module.write_atomic))
    monkeypatch.setattr(module, "write_shard", stop(module.write_shard))
    with pytest.raises(KeyboardInterrupt):
        prepare("sample", "char", tmp_path, shard_tokens=6000, overwrite=again)
    if writes == 0 and again:
        assert load(tmp_path).tokenizer.name == "byte"  # nothing had been changed
        return
    with pytest.raises((ValueError, FileNotFoundError), match=r"was interrupted;|holds no \.txt"):
        load(tmp_path)


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="shard_tokens: got 0, allowed is 1 to 2147483647"):
        prepare("sample", "char", tmp_path, shard_tokens=0)
    with pytest.raises(ValueError, match=r"tokenizer: got 'gpt3'.*Did you mean 'gpt2'"):
        prepare("sample", "gpt3", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out: got the file"):
        prepare("sample", "char", tmp_path / "file")


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "nanogpt_jax.data", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_the_command(tmp_path):
    done = run("prepare", "--input", "sample", "--tokenizer", "char", "--out", tmp_path / "o")
    assert done.returncode == 0, done.stderr
    assert "training and 1315 validation tokens in 1 + 1 shards, tokenizer char (55" in done.stdout
    assert len(load(tmp_path / "o").val_tokens) == 1315


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--input", "smaple", "--tokenizer", "char"], "Did you mean 'sample'?"),
        (["--input", "sample", "--tokenizer", "chra"], "Did you mean 'char'?"),
        (["--input", "sample", "--tokenizer", "char", "--val-fraction", "2"], "val_fraction: got"),
        (["--input", "sample", "--tokenizer", "char", "--out", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, text, capsys):
    from nanogpt_jax.data.__main__ import main

    assert main(["prepare", "--out", str(tmp_path / "o"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_wrong_usage_is_exit_code_2():
    done = run("prepare", "--input", "sample")
    assert done.returncode == 2
    assert "the following arguments are required: --tokenizer, --out" in done.stderr
    assert "Traceback" not in done.stderr
