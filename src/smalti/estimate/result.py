"""A program's time: every operation of its schedule priced, its Pallas kernels by simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smalti.chips import TENSOR_CORES, TensorCore
from smalti.estimate.errors import EstimateError, Unstated
from smalti.estimate.module import Op, Overlap, Schedule, Summary, read_module, schedule, summarize
from smalti.estimate.program import KernelDump, Program
from smalti.estimate.simulate import Simulation, simulate


@dataclass(frozen=True)
class Estimate:
    """What one run of a program costs one TensorCore. All of it is an estimate."""

    program: Program
    core: TensorCore
    schedule: Schedule  # with its kernels' times filled in
    summary: Summary
    simulations: dict[str, Simulation]  # by op name: of kernels, and of XLA's where it works

    @property
    def cycles(self) -> float:
        return self.summary.cycles

    @property
    def time_ns(self) -> float:
        return self.cycles / self.core.clock_hz * 1e9

    @property
    def bytes_hbm(self) -> int:
        """Read and written; an upper bound where XLA's operations touch HBM."""
        return self.summary.bytes_hbm_read + self.summary.bytes_hbm_written

    @property
    def kernel_cycles(self) -> float:
        return sum(op.count * (op.cycles or 0.0) for op in self.schedule.kernels)

    @property
    def simulated_cycles(self) -> float:
        return sum(op.count * (op.cycles or 0.0) for op in self._simulated)

    @property
    def _simulated(self) -> list[Op]:
        return [op for op in self.schedule.ops if op.name in self.simulations and op.cycles]

    @property
    def busy_cycles(self) -> dict[str, float]:
        """By unit, how long it is busy: in what is simulated; HBM in all of the program."""
        busy: dict[str, float] = {}
        for op in self._simulated:
            for unit, share in self.simulations[op.name].occupancy.items():
                busy[unit] = busy.get(unit, 0.0) + op.count * (op.cycles or 0.0) * share
        busy["HBM"] = self.bytes_hbm / self.core.device_hbm_bytes_per_cycle
        return busy

    @property
    def occupancy(self) -> dict[str, float]:
        """By unit, the share of the simulated time that it is busy; HBM's is of all the time.

        What is priced otherwise has no units.
        """
        times = dict.fromkeys(self.busy_cycles, self.simulated_cycles) | {"HBM": self.cycles}
        return {unit: busy / times[unit] for unit, busy in self.busy_cycles.items() if times[unit]}

    @property
    def bound(self) -> str:
        """The unit that is busy for longest."""
        return max(self.busy_cycles, key=lambda unit: self.busy_cycles[unit])

    @property
    def bound_cycles(self) -> float:
        """What that unit alone would take."""
        return self.busy_cycles[self.bound]


def estimate(
    program: Program,
    *,
    overlap: Overlap = "full",
    trip_counts: Mapping[str, int] | None = None,
    branches: Mapping[str, int] | None = None,
    operands: Mapping[str, Mapping[int, np.ndarray]] | None = None,
    kernel_branches: Mapping[str, Mapping[int, bool | Sequence[bool]]] | None = None,
    core: TensorCore | None = None,
) -> Estimate:
    """The time of a compiled program on one TensorCore of its chip.

    overlap: what asynchronous copies overlap with, see `smalti.estimate.module.ASSUMPTIONS`.
    trip_counts, branches: of loops and conditionals that depend on data, by their names.
    operands: values of a kernel's operands that the program computes, by op name and number; those
        that are constants of the program are read from it.
    kernel_branches: inside of kernels, see `simulate`.
    core: other constants than those of the program's chip.

    XLA's operations whose bundles can be simulated take the simulation, the others the compiler's
    `estimated_cycles`.

    Raises ValueError for a name that the program does not have, and the errors of
    `smalti.estimate.errors` where there is no answer.
    """
    core = core or TENSOR_CORES[program.chip]
    listed = schedule(
        read_module(program.hlo),
        bytes_per_cycle=core.device_hbm_bytes_per_cycle,
        kernels=program.kernels,
        overlap=overlap,
        trip_counts=trip_counts,
        branches=branches,
    )
    operands, kernel_branches = dict(operands or {}), dict(kernel_branches or {})
    names = [op.name for op in listed.kernels]
    for argument, stated in (("operands", operands), ("kernel_branches", kernel_branches)):
        for name in stated:
            if name not in names:
                raise ValueError(
                    f"{argument}: the program has no kernel {name!r}; it has "
                    + (", ".join(map(repr, names)) or "none at all")
                )
    simulations: dict[str, Simulation] = {}
    alike: dict[object, Simulation] = {}  # layers run the same kernel on the same tables
    for op in listed.kernels:
        if op.name in simulations:
            continue
        dump = program.kernels.get(op.name)
        if dump is None:
            raise EstimateError(f"the program holds no dump of its kernel {op.name}")
        values = list(op.operands)
        for number, value in operands.get(op.name, {}).items():
            if not 0 <= number < len(values):
                raise ValueError(
                    f"operands[{op.name!r}][{number}]: it has operands 0 to {len(values) - 1}"
                )
            values[number] = np.asarray(value)
        stated = kernel_branches.get(op.name, {})
        key = None if stated else _key(dump, values)
        found = alike.get(key) if key is not None else None
        if found is None:
            try:
                found = simulate(dump, core, values, stated)
            except Unstated as error:
                raise Unstated(
                    f"{error}. State it in Python: estimate(…, operands={{{op.name!r}: {{number: "
                    f"array}}}}), or kernel_branches={{{op.name!r}: {{address: True}}}}"
                ) from error
            alike[key] = found
        simulations[op.name] = found
        listed = listed.with_kernel(
            op.name, found.cycles, found.bytes_hbm_read, found.bytes_hbm_written
        )
    listed = _simulate_xla(program, core, listed, simulations)
    return Estimate(program, core, listed, summarize(listed), simulations)


def _simulate_xla(
    program: Program, core: TensorCore, listed: Schedule, simulations: dict[str, Simulation]
) -> Schedule:
    """The schedule with XLA's operations simulated where that works.

    Of operations that are alike, as those of a model's layers, the compiler writes one out, and the
    others take its simulation.
    """
    alike: dict[object, Simulation] = {}
    for op in listed.ops:
        if op.kind != "kernel" and op.cycles and op.name in program.xla_ops:
            if op.name not in simulations:
                try:
                    simulations[op.name] = simulate(program.xla_ops[op.name], core, ())
                except EstimateError:
                    continue  # written otherwise than kernels are: the compiler's estimate stays
            alike.setdefault(_likeness(op), simulations[op.name])
    ops = []
    for op in listed.ops:
        found = simulations.get(op.name)
        if found is None and op.kind != "kernel" and op.cycles:
            found = alike.get(_likeness(op))
        if found is not None and op.kind != "kernel":
            simulations[op.name] = found
            op = replace(op, cycles=found.cycles, compiler_cycles=op.cycles, priced_by="simulation")
        ops.append(op)
    return replace(listed, ops=tuple(ops))


def _likeness(op: Op) -> object:
    origin = op.op_name.rstrip("0123456789.")
    return op.opcode, origin, op.cycles, op.bytes_hbm_read, op.bytes_hbm_written


def _key(dump: KernelDump, values: Sequence[np.ndarray | None]) -> object:
    # Names of registers and of the op itself differ between copies of one kernel's dump.
    return dump.bundles, tuple(None if v is None else (v.shape, v.tobytes()) for v in values)
