"""Executes a kernel's schedule, bundle by bundle, and says what it cost."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smalti.chips import TensorCore
from smalti.estimate.bundles.listing import Listing, parse_listing
from smalti.estimate.bundles.utilization import UNITS, Utilization, parse_utilization
from smalti.estimate.errors import DumpUnreadable, EstimateError, SimulationFailed
from smalti.estimate.program import KernelDump
from smalti.estimate.simulate.blocks import Block, make_blocks, operand_index
from smalti.estimate.simulate.machine import LOWEST_ADDRESS, Copy, Machine, Wait
from smalti.estimate.simulate.operations import REGISTERS, WORD, Addresses, Unknown
from smalti.estimate.simulate.tiling import smem_words

# Blocks without a copy, and in all, after which a loop is taken not to end: seconds, and minutes.
BLOCKS_WITHOUT_COPY = 4_000_000
BLOCKS = 400_000_000


@dataclass(frozen=True)
class Simulation:
    """One run of a kernel on one TensorCore. Cycles are of its clock."""

    op: str
    core: TensorCore
    cores: int  # that share the kernel; all but bytes and copies is of the slowest of them
    cycles: float
    cycles_waiting: float  # of these, waiting for copies
    cycles_mxu: float  # of these, waiting for an MXU that is given more than it can do
    mxu_busy: float  # cycles of work, all MXUs together
    bundles: int  # executed, one cycle each
    bytes: dict[str, int]  # copied, by route: "hbm_to_vmem"
    copies: dict[str, int]  # how many, by route
    smem_bytes: int  # of SMEM that were written, spilled scalars among them
    slots_used: dict[str, int]  # by unit
    slots: dict[str, int]  # a bundle has, by unit
    timeline: tuple[Copy | Wait, ...]  # the first TIMELINE_LIMIT of them
    listing: Listing
    utilization: Utilization
    executions: np.ndarray  # of each bundle

    @property
    def time_ns(self) -> float:
        return self.cycles / self.core.clock_hz * 1e9

    @property
    def bytes_hbm_read(self) -> int:
        return sum(n for route, n in self.bytes.items() if route.startswith("hbm_to_"))

    @property
    def bytes_hbm_written(self) -> int:
        return sum(n for route, n in self.bytes.items() if route.endswith("_to_hbm"))

    @property
    def occupancy(self) -> dict[str, float]:
        """What is used over what there was in all cycles: slots by unit, and HBM's bandwidth.

        Of the MXU it is the cycles of its work: an operation keeps it for longer than a slot.
        """
        shares = {
            unit: used / (self.slots[unit] * self.cycles) for unit, used in self.slots_used.items()
        }
        hbm = (self.bytes_hbm_read + self.bytes_hbm_written) / self.core.hbm_bytes_per_cycle
        hbm /= self.cores
        mxu = self.mxu_busy / (self.slots["MXU"] * self.cycles)
        return {**shares, "MXU": mxu, "HBM": hbm / self.cycles}

    @property
    def bound(self) -> str:
        """The busiest unit."""
        shares = self.occupancy
        return max(shares, key=lambda unit: shares[unit])

    @property
    def bound_cycles(self) -> float:
        """What the busiest unit alone would take."""
        return self.cycles * self.occupancy[self.bound]

    def executions_of_regions(self) -> dict[int, int]:
        """How often each region of the listing ran, by its number.

        A region may start ahead of the branch around it, with operations that were moved there; its
        last bundle then tells how often it ran.
        """
        runs = {n: int(self.executions[at]) for n, at in self.listing.regions.items()}
        for at, regions in self.listing.ends.items():
            for n in regions:
                if n in runs:
                    runs[n] = min(runs[n], int(self.executions[at]))
        return runs


def simulate(
    kernel: KernelDump,
    core: TensorCore,
    operands: Sequence[np.ndarray | None],
    branches: Mapping[int, bool | Sequence[bool]] | None = None,
) -> Simulation:
    """Runs one Pallas kernel's schedule.

    operands: the kernel's inputs in order, as arrays where they decide anything (scalar-prefetch
        operands, a dynamic grid), None for the others.
    branches: what branches do that the schedule alone does not decide, by the address of their
        bundle: one answer, or one for each time in turn.

    Raises DumpUnreadable for a damaged dump, UnknownOperation for an operation not known, Unstated
    where the control flow depends on a value that is not there, SimulationFailed for a kernel that
    halts, waits for ever or leaves copies under way, ValueError for branches that are none.
    """
    listing = parse_listing(kernel.bundles, kernel.op)
    used = parse_utilization(kernel.utilization, kernel.op, len(listing.bundles))
    values, arrays = _place(listing, operands)
    blocks = make_blocks(listing, core, Addresses(), values, _stated(listing, branches or {}))
    # Cores that share a kernel split its grid between them: it ends when the slower one does.
    shared = any(o.is_core_id for bundle in listing.bundles for o in bundle.operations)
    runs = []
    for core_id in range(core.cores_per_device if shared else 1):
        machine = Machine(core, core_id, arrays, smem_words)
        runs.append((machine, _run(blocks, machine, listing)))
        machine.finish()
    machine, counts = max(runs, key=lambda run: run[0].time)
    executions = np.zeros(len(listing.bundles), np.int64)
    for start, count in counts.items():
        executions[start : blocks[start].stop] += count
    slots = executions @ used.used
    return Simulation(
        op=kernel.op,
        core=core,
        cores=len(runs),
        cycles=machine.time,
        cycles_waiting=machine.cycles_waiting,
        cycles_mxu=sum(
            count * (blocks[at].cycles - blocks[at].bundles) for at, count in counts.items()
        ),
        mxu_busy=sum(count * sum(blocks[at].mxu_cycles.values()) for at, count in counts.items()),
        bundles=sum(count * blocks[at].bundles for at, count in counts.items()),
        bytes=_sum(m.bytes for m, _ in runs),
        copies=_sum(m.copies for m, _ in runs),
        smem_bytes=4 * len(machine.memory),
        slots_used=dict(zip(UNITS, slots.tolist(), strict=True)),
        slots=dict(zip(UNITS, used.capacity.tolist(), strict=True)),
        timeline=tuple(machine.timeline),
        listing=listing,
        utilization=used,
        executions=executions,
    )


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for route, n in one.items():
            total[route] = total.get(route, 0) + n
    return total


def _run(blocks: dict[int, Block], machine: Machine, listing: Listing) -> dict[int, int]:
    registers: dict[str, object] = {
        name: Unknown(f"register {name}, which nothing has written") for name in REGISTERS
    }
    counts = dict.fromkeys(blocks, 0)
    runs = {start: block.run for start, block in blocks.items()}
    previous, at = 0, 0
    copies = since = 0
    try:
        while at is not None:
            for _ in range(BLOCKS_WITHOUT_COPY):
                counts[at] += 1
                previous = at
                at = runs[at](machine, registers)
                if at is None:
                    break
            since += BLOCKS_WITHOUT_COPY
            before, copies = copies, sum(machine.copies.values())
            if at is not None and (before == copies or since >= BLOCKS):
                raise SimulationFailed(
                    f"no end after {since} blocks; a loop of the kernel does not seem to end"
                )
    except EstimateError as error:
        where = f"{listing.op}, block at bundle {previous:#x}"
        if source := _source(listing, previous, str(error)):
            where += f" (near {source})"
        raise type(error)(f"{where}: {error}") from error
    return counts


def _source(listing: Listing, block: int, error: str) -> str | None:
    """The line of the kernel's source behind an error: of the bundle it names, or what follows."""
    named = re.findall(r"at bundle (0x[0-9a-f]+)", error)
    at = int(named[-1], 16) if named else block
    for bundle in (*listing.bundles[at:], *reversed(listing.bundles[:at])):
        for operation in bundle.operations:
            if operation.source is not None:
                file, line = operation.source
                return f"{os.path.basename(file)}:{line}"
    return None


_SHAPE = re.compile(r"\[shape: ([a-z]+)(\d*)\S*?\[([\d,]*)\]")


def _place(listing: Listing, operands: Sequence[np.ndarray | None]):
    """Gives every operand of the entry bundle an address, or its value if it has no memory."""
    values: dict[int, object] = {}
    arrays: dict[int, object] = {}
    addressed = []
    for operation in listing.bundles[0].operations:
        if not operation.opcode.startswith("inlined_call_operand"):
            continue
        try:
            index = operand_index(operation)
        except ValueError as error:
            raise DumpUnreadable(
                f"{listing.op}: which operand is {operation.text[:120]!r}? The dump is damaged"
            ) from error
        is_input = "kind: input" in operation.text
        array = operands[index] if is_input and index < len(operands) else None
        if array is not None:
            array = np.asarray(array)
            _check_shape(listing.op, index, array, operation.text)
        if "<no memory space>" not in operation.text:
            addressed.append((array is None, index, array))
        elif array is None:
            values[index] = Unknown(f"operand {index}, a scalar whose value is not stated")
        else:
            values[index] = int(array.reshape(()).astype(np.int64)) & WORD
    # A copy into SMEM knows an operand by its address. So those that are given stand first, each
    # with room for itself; behind them nothing is stored, so that the others may overlap. But
    # bounds checks compare with sums of these, which must stay positive words, also after `<< 4`.
    base = LOWEST_ADDRESS
    for unknown, index, array in sorted(addressed, key=lambda place: place[:2]):
        base += 1 << 10
        values[index] = base
        arrays[base] = Unknown(
            f"a word copied into SMEM from operand {index}, whose value is not stated"
        )
        if not unknown:
            arrays[base] = array
            base += array.nbytes // 4
    if base >= 2 * LOWEST_ADDRESS:
        raise SimulationFailed(f"{listing.op}: its stated operands are too large to be addressed")
    return values, arrays


def _check_shape(op: str, index: int, array: np.ndarray, text: str) -> None:
    match = _SHAPE.search(text)
    if match is None:
        raise DumpUnreadable(f"{op}: operand {index} has no shape; the dump is damaged")
    shape = tuple(int(n) for n in match[3].split(",") if n)
    bits = int(match[2] or 8)  # "pred" is a byte
    if array.shape != shape or array.dtype.itemsize * 8 != bits:
        raise ValueError(
            f"operands[{index}] of {op} is {array.dtype}{list(array.shape)}; the kernel was "
            f"compiled for {match[1]}{match[2]}{list(shape)}"
        )


def _stated(listing: Listing, branches: Mapping[int, bool | Sequence[bool]]):
    real = {b.address for b in listing.bundles for o in b.operations if o.opcode == "sbr.rel"}
    answers = {}
    for at, given in branches.items():
        if at not in real:
            raise ValueError(
                f"branches[{at:#x}]: {listing.op} has no branch there; its branches are at "
                + ", ".join(f"{address:#x}" for address in sorted(real))
            )
        answers[at] = _answers(at, given)
    return answers


def _answers(at: int, given: bool | Sequence[bool]):
    if isinstance(given, bool):
        return lambda: given
    left = iter(given)

    def answer() -> bool:
        try:
            return bool(next(left))
        except StopIteration:
            raise SimulationFailed(
                f"branches[{at:#x}] has {len(given)} answers, and the branch is reached again"
            ) from None

    return answer
