"""An `Estimate` as JSON values: all that the tables, the chart and `--diff` need."""

import linecache
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from smalti.estimate.module import Op
from smalti.estimate.module.hlo import read_module, scoped_vmem_bytes
from smalti.estimate.report.lines import Line, source_lines
from smalti.estimate.result import Estimate
from smalti.estimate.simulate import Simulation

# What is shown of the occupancy, by the name it is shown under.
OCCUPANCY = {
    "MXU": "MXU",
    "XLU": "XLU",
    "VALU": "VALU",
    "EUP": "EUP",
    "VLOAD": "VLOAD",
    "VSTORE": "VSTORE",
    "fill": "VLOAD:FILL",
    "spill": "VSTORE:SPILL",
    "SALU": "SALU",
    "HBM": "HBM",
}
# `smalti.attention` names its choice by a scope, which the compiler keeps in the module.
_CHOICE = re.compile(r"smalti\.attention\[(\w+)\]")

_HALF = "one TensorCore, which is half a chip and a jax device of its own"
_WHOLE = "one TensorCore, which is the whole chip"
UNITS_OF_TIME = {
    "v4": f"{_HALF}; that two of them can share a kernel (megacore) is not modelled",
    "v5e": _WHOLE,
    "v5p": "one TensorCore of the two that a chip has. They run the program together (megacore): "
    "the schedule of core 0 is simulated, with its part of a kernel's grid where the compiler "
    "splits it, and half of the chip's HBM bandwidth",
    "v6e": _WHOLE,
    "v7x": f"{_HALF}; nothing is split between the two",
}


def entry(result: Estimate, *, label: str, variant: str | None = None) -> dict[str, Any]:
    """The estimate as a dict of JSON values.

    label: how far to trust it, `smalti.estimate.trust(chip).label`.
    variant: which of a peer's choices it is.

    Cycles and bytes of `ops` and `kernels` are those of one execution. Operations that take no time
    are left out.
    """
    program, summary = result.program, result.summary
    occupancy = {unit: float(share) for unit, share in result.occupancy.items()}
    kernels = _kernels(result)
    return {
        "name": program.name,
        **({} if variant is None else {"variant": variant}),
        "label": label,
        "chip": program.chip,
        "topology": program.topology,
        "devices": program.devices,
        "unit": UNITS_OF_TIME[program.chip],
        "clock_hz": result.core.clock_hz,
        "cycles": float(result.cycles),
        "time_ns": float(result.time_ns),
        "cycles_kernels": float(result.kernel_cycles),
        "cycles_by_kind": {kind: float(n) for kind, n in summary.cycles_by_kind.items()},
        "bytes_hbm": int(result.bytes_hbm),
        "bytes_hbm_read": int(summary.bytes_hbm_read),
        "bytes_hbm_written": int(summary.bytes_hbm_written),
        "bound": result.bound,
        "bound_time_ns": result.bound_cycles / result.core.clock_hz * 1e9,
        "occupancy": occupancy,
        "memory": {**asdict(program.memory), "peak_bytes": program.memory.peak_bytes},
        "lowered": {
            "kernels": [op for kernel in kernels for op in kernel["ops"]],
            "smalti_attention": sorted(set(_CHOICE.findall(program.hlo))),
        },
        "flags": list(program.flags),
        "versions": dict(program.versions),
        "assumptions": list(summary.assumptions),
        "unpriced": [asdict(op) for op in summary.unpriced],
        "kernels": kernels,
        "ops": [_op(op) for op in result.schedule.ops if op.priced_by != "free" and op.count],
    }


def lowered_words(found: Mapping[str, Any]) -> str:
    """What an entry's program was lowered to, in words."""
    kernels = found["lowered"]["kernels"]
    choices = found["lowered"]["smalti_attention"]
    words = (
        f"{len(kernels)} Pallas kernel{'s' * (len(kernels) > 1)} ({', '.join(kernels)})"
        if kernels
        else "no Pallas kernel: XLA alone"
    )
    return words + "".join(f"; smalti.attention ran as {choice!r}" for choice in choices)


def _kernels(result: Estimate) -> list[dict[str, Any]]:
    """Each kernel once, however many operations run the same one."""
    scratch = scoped_vmem_bytes(read_module(result.program.hlo))
    ops: dict[int, list[Op]] = {}
    for op in result.schedule.kernels:
        ops.setdefault(id(result.simulations[op.name]), []).append(op)
    return [_kernel(result.simulations[same[0].name], same, scratch) for same in ops.values()]


def _kernel(simulation: Simulation, ops: list[Op], scratch: dict[str, int]) -> dict[str, Any]:
    return {
        "ops": list(dict.fromkeys(op.name for op in ops)),
        "executions": sum(op.count for op in ops),
        "cycles": float(simulation.cycles),
        "time_ns": float(simulation.time_ns),
        "cycles_waiting": float(simulation.cycles_waiting),
        "cycles_mxu": float(simulation.cycles_mxu),
        "bundles": int(simulation.bundles),
        "bytes": dict(simulation.bytes),
        "copies": dict(simulation.copies),
        "bound": simulation.bound,
        "bound_cycles": float(simulation.bound_cycles),
        "occupancy": {unit: float(share) for unit, share in simulation.occupancy.items()},
        "smem_bytes": simulation.smem_bytes,
        "vmem_bytes": scratch.get(ops[0].name),
        "source": list(ops[0].source) if ops[0].source else None,
        "lines": [_line(line) for line in source_lines(simulation)],
    }


def _line(line: Line) -> dict[str, Any]:
    return {**asdict(line), "text": _text(line.file, line.line)}


def _op(op: Op) -> dict[str, Any]:
    file, number = op.source or (None, None)
    return {
        "name": op.name,
        "opcode": op.opcode,
        "kind": op.kind,
        "priced_by": op.priced_by,
        "cycles": None if op.cycles is None else float(op.cycles),
        "compiler_cycles": op.compiler_cycles,
        "count": op.count,
        "bytes_hbm_read": op.bytes_hbm_read,
        "bytes_hbm_written": op.bytes_hbm_written,
        "path": list(op.path),
        "thread": op.thread,
        "op_name": op.op_name,
        "file": file,
        "line": number,
        "text": _text(file, number),
    }


def _text(file: str | None, line: int | None) -> str | None:
    """The line itself, where its file can be read here."""
    if file is None or line is None:
        return None
    return linecache.getline(file, line).strip() or None
