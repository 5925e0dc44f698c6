"""Runs small enough for a test: one narrow layer on the repository's own text."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

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


@pytest.fixture(scope="session", autouse=True)
def _shared_programs(tmp_path_factory):
    """Compiled programs are kept for the session, its child processes included: most runs here
    compile the same ones, and do little else."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # it looks at the options once
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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


def start(module: str, args: list[str], folder: Path) -> "subprocess.Popen[str]":
    """`python -m nanogpt_jax.<module>` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"nanogpt_jax.{module}", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
