"""The machine under the benchmark: its cores, its name, and what a process takes of its memory."""

import os
import platform
from pathlib import Path

import jax


def use_cpu() -> None:
    """Keep JAX off any accelerator: its times would stand beside PyTorch's on the CPU.

    By jax's own setting, since `python -m smalti…` imports jax before it runs a line of ours.
    """
    jax.config.update("jax_platforms", "cpu")


def usable_cores() -> int:
    """Cores that this process may use, which is what both JAX and PyTorch are given."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def model() -> str:
    """The processor's name, or what Python knows of it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def resident_mib() -> tuple[float, float] | None:
    """This process's resident memory now and at its highest, in MiB; None off Linux.

    Not `getrusage`: its peak survives `exec`, so that a child starts with its parent's.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(
        line.split(":", 1) for line in status.read_text().splitlines() if line.startswith("Vm")
    )
    now, peak = (int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak
