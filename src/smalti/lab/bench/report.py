"""What a run leaves: a table to read and a JSON record that names everything."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from smalti.files import write_whole
from smalti.lab.bench import cpu
from smalti.lab.bench.cases import MEMORY_BAR_MIB, OURS
from smalti.lab.bench.run import Result


@dataclass
class Memory:
    """Growth of a fresh process over one call, in MiB, by implementation."""

    case: str
    growth_mib: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    bar_mib: float | None = MEMORY_BAR_MIB


def print_result(console: Console, result: Result) -> None:
    table = Table(title=result.case.name, title_justify="left")
    table.add_column("", min_width=10)
    for heading in ("median ms", "min – max ms", "calls", "÷ ours", "asked"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, timing in result.timings.items():
        low, high = min(timing.samples_s) * 1e3, max(timing.samples_s) * 1e3
        ratio = result.ratio(name)
        table.add_row(
            name,
            f"{timing.median_s * 1e3:.1f}",
            f"{low:.1f} – {high:.1f}",
            str(len(timing.samples_s)),
            "" if name == OURS else f"{ratio:.2f}×",
            _verdict(result.case.bars.get(name), ratio),
        )
    console.print(table)
    for name, reason in result.left_out.items():
        console.print(f"  {name} left out: {reason}", highlight=False)


def _verdict(bar: float | None, ratio: float) -> str:
    return "" if bar is None else asked(f"≥ {bar:g}×", ratio >= bar)


def asked(bar: str, met: bool) -> str:
    return f"[green]{bar} met[/]" if met else f"[red]{bar} missed[/]"


def print_memory(console: Console, memory: Memory) -> None:
    table = Table(title=f"growth of a fresh process, {memory.case}", title_justify="left")
    table.add_column("", min_width=10)
    table.add_column("MiB", justify="right")
    table.add_column("asked", justify="right")
    for name, growth in memory.growth_mib.items():
        asked = ""
        if name == OURS and memory.bar_mib is not None:
            met = growth < memory.bar_mib
            asked = (
                f"[{'green' if met else 'red'}]< {memory.bar_mib:g} {'met' if met else 'missed'}[/]"
            )
        table.add_row(name, f"{growth:.0f}", asked)
    console.print(table)
    for name, reason in memory.left_out.items():
        console.print(f"  {name} left out: {reason}", highlight=False)


def record(results: list[Result], memory: Memory | None, rounds: int) -> dict[str, Any]:
    """Everything a reader needs to repeat the run or doubt it; times in seconds."""
    return {
        "schema": 1,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": sys.argv[1:],
        "rounds": rounds,
        "git": git_state(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("smalti", "jax", "jaxlib", "numpy", "torch")},
        },
        "device": {
            "platform": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "cpu": cpu.model(),
            "cores": cpu.usable_cores(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "environment": {
            name: os.environ[name]
            for name in ("XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
            if name in os.environ
        },
        "results": [_result_record(result) for result in results],
        "memory": None if memory is None else dataclasses.asdict(memory),
    }


def _result_record(result: Result) -> dict[str, Any]:
    return {
        "name": result.case.name,
        "case": dataclasses.asdict(result.case),
        "left_out": result.left_out,
        "implementations": {
            name: {
                **dataclasses.asdict(timing),
                "median_s": timing.median_s,
                "ratio_to_ours": result.ratio(name),
            }
            for name, timing in result.timings.items()
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any]:
    """The commit of the source that ran, and whether it was changed since; empty outside git."""
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "changed": bool(_git(here, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")
