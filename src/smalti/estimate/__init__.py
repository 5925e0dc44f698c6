"""A stopwatch without a TPU: what the real TPU compiler's schedule costs.

    program = compile_for(fn, *shapes, chip="v6e")   # by libtpu, on any x86-64 machine
    result = estimate(program)
    result.time_ns, result.bound, result.bytes_hbm

Every number is an estimate; `docs/estimate.md` says how it comes about and how far to trust it.
"""

from smalti.estimate.compile import compile_for
from smalti.estimate.errors import (
    CompileFailed,
    CompilerMissing,
    DumpUnreadable,
    EstimateError,
    SimulationFailed,
    UnknownOperation,
    Unstated,
)
from smalti.estimate.program import KernelDump, Memory, Program
from smalti.estimate.result import Estimate, estimate
from smalti.estimate.simulate import Simulation, simulate
from smalti.estimate.trust import Trust, trust

__all__ = [
    "CompileFailed",
    "CompilerMissing",
    "DumpUnreadable",
    "Estimate",
    "EstimateError",
    "KernelDump",
    "Memory",
    "Program",
    "Simulation",
    "SimulationFailed",
    "Trust",
    "UnknownOperation",
    "Unstated",
    "compile_for",
    "estimate",
    "simulate",
    "trust",
]
