"""What the commands share."""

import os
import subprocess
import sys

import pytest

from nanogpt_jax import compare, sample
from nanogpt_jax.data import __main__ as data

PROGRAM = """
import sys
from nanogpt_jax.cli import command

@command
def main(argv=None):
    for _ in range(100000):
        print("2 × 3")
    return 0

sys.exit(main())
"""


def run(lines):
    """(exit code, stderr, the first lines) of PROGRAM in ASCII, read no further than those."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert process.stdout
    assert process.stderr
    read = [process.stdout.readline() for _ in range(lines)]
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    return process.wait(timeout=60), error, read


def test_a_reader_that_leaves_and_an_encoding_without_our_signs():
    assert run(1) == (141, "", ["2 ? 3\n"])


@pytest.mark.parametrize(
    ("main", "args"),
    [
        (sample.main, ["--run", ""]),
        (compare.main, ["", "x"]),
        (compare.main, ["x", "y", "--out", ""]),
        (data.main, ["prepare", "--tokenizer", "char", "--out", "x", "--input", ""]),
        (data.main, ["prepare", "--tokenizer", "char", "--input", "sample", "--out", ""]),
    ],
)
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, capsys, main, args):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert "got ''; it must be a path, or '.' for the current folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
