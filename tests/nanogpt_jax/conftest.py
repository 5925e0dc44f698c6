"""Runs small enough for a test: one narrow layer on the repository's own text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanogpt_jax import train
from nanogpt_jax.config import Config, load_config

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "configs" / "smoke.yaml"
TINY = (
    "model.num_layers=1",
    "model.dim=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "attention.impl=xla",
    "optimizer.name=adamw",
    "training.num_iterations=6",
    "training.batch_size=4",
    "training.seq_len=16",
    "training.eval_every=2",
    "training.eval_windows=8",
    "checkpoint.every=2",
    "sampling.num_tokens=5",
)


def arguments(*overrides: str) -> list[str]:
    """The command line of a tiny run."""
    args = ["--config", str(SMOKE)]
    for override in (*TINY, *overrides):
        args += ["--override", override]
    return args


def tiny_config(*overrides: str) -> Config:
    return load_config(SMOKE, [*TINY, *overrides])


@pytest.fixture
def run_train(tmp_path, capsys, monkeypatch):
    """Trains in this process, in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        capsys.readouterr()
        code = train.main([*arguments(*overrides), *flags])
        return code, *capsys.readouterr()

    return run


def start(
    module: str, args: list[str], folder: Path, **environment: str
) -> "subprocess.Popen[str]":
    """`python -m nanogpt_jax.<module>` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"nanogpt_jax.{module}", *args],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
