"""What the stopwatch says of a published row, as a function of the constants that were fitted."""

from dataclasses import dataclass, replace

import numpy as np

from smalti.chips import TENSOR_CORES
from smalti.estimate.calibrate.rows import Row
from smalti.estimate.compile import compile_for
from smalti.estimate.errors import CompileFailed, EstimateError
from smalti.estimate.program import Program
from smalti.estimate.result import estimate

# Where a row is simulated, to know its time in between by straight lines: it is piecewise linear in
# the copies' latency, in ns, and in the share of a product's time that weights take.
LATENCIES_NS = (300.0, 500.0, 700.0)
PUSH_SHARES = (0.0, 0.25, 0.5)


@dataclass(frozen=True)
class Constants:
    """All that is fitted, on published rows. Everything else is read off the chip's documents."""

    dma_latency_ns: float
    mxu_push_share: float
    dispatch_s: float  # of a timing from the host


@dataclass(frozen=True)
class Subject:
    """The program that stands for a row, and what it takes where it is simulated."""

    row: Row
    variant: str  # its name
    by_latency: np.ndarray  # cycles at LATENCIES_NS, with the middle push share
    by_share: np.ndarray  # cycles at PUSH_SHARES, with the middle latency

    def device_seconds(self, constants: Constants) -> float:
        latency = np.interp(constants.dma_latency_ns, LATENCIES_NS, self.by_latency)
        share = np.interp(constants.mxu_push_share, PUSH_SHARES, self.by_share)
        # The two are independent to first order: one counts where copies bind, one where MXUs do.
        cycles = float(latency + share - self.by_share[1])
        return cycles / TENSOR_CORES[self.row.chip].clock_hz

    def seconds(self, constants: Constants) -> float:
        dispatch = constants.dispatch_s if self.row.includes_dispatch else 0.0
        return self.device_seconds(constants) + dispatch


def subject(row: Row) -> Subject:
    """Compiles what a row may have measured, keeps the fastest, and simulates it.

    Raises EstimateError where nothing of it compiles, or a peer is not installed.
    """
    core = TENSOR_CORES[row.chip]
    best: tuple[float, str, Program] | None = None
    refused = "no candidate"
    for variant in row.candidates():
        try:
            program = compile_for(variant.fn, *variant.args, chip=row.chip)
        except CompileFailed as error:
            refused = f"{variant.name}: {error}"
            continue
        cycles = estimate(program, core=core).cycles
        if best is None or cycles < best[0]:
            best = cycles, variant.name, program
    if best is None:
        raise EstimateError(f"row {row.id}: nothing of it compiles; {refused}")
    _, name, program = best

    def cycles_at(latency_ns: float, share: float) -> float:
        constants = replace(core, dma_latency_s=latency_ns * 1e-9, mxu_push_share=share)
        return estimate(program, core=constants).cycles

    by_latency = [cycles_at(latency, PUSH_SHARES[1]) for latency in LATENCIES_NS]
    by_share = [cycles_at(LATENCIES_NS[1], share) for share in (PUSH_SHARES[0], PUSH_SHARES[2])]
    by_share.insert(1, by_latency[1])
    return Subject(row, name, np.array(by_latency), np.array(by_share))
