"""What a schedule comes to: cycles and bytes by kind, and what the sum leaves out."""

from dataclasses import dataclass

from smalti.estimate.errors import EstimateError
from smalti.estimate.module.prices import Kind
from smalti.estimate.module.schedule import ASSUMPTIONS, Op, Schedule


@dataclass(frozen=True)
class Unpriced:
    """An operation whose time nobody knows; it adds nothing to the sum."""

    name: str
    opcode: str
    op_name: str
    count: int
    bytes_moved: int  # of one execution: the larger of what it reads and writes, in any memory


@dataclass(frozen=True)
class Summary:
    """Totals over a schedule; each operation times its count."""

    cycles: float  # of all that has a price: a lower bound where `unpriced` is not empty
    cycles_by_kind: dict[Kind, float]
    cycles_not_from_the_compiler: float  # of copies: bytes over bandwidth
    bytes_hbm_read: int  # upper bounds, except of kernels, which are simulated
    bytes_hbm_written: int
    unpriced: tuple[Unpriced, ...]
    assumptions: tuple[str, ...]  # whole sentences for a report


def summarize(schedule: Schedule) -> Summary:
    """Adds a schedule up.

    Raises EstimateError where a kernel's simulation has not been filled in: a sum without it
    would be a wrong number.
    """
    missing = [op.name for op in schedule.kernels if op.cycles is None]
    if missing:
        raise EstimateError(
            f"the kernels {', '.join(missing)} have no cycles yet: simulate them and give the "
            "result to Schedule.with_kernel"
        )
    by_kind: dict[Kind, float] = {}
    by_bandwidth, read, written = 0.0, 0, 0
    pipe = 0.0  # cycles that HBM needs for all of it
    unpriced = []
    for op in schedule.ops:
        read += op.count * (op.bytes_hbm_read or 0)
        written += op.count * (op.bytes_hbm_written or 0)
        bytes_hbm = (op.bytes_hbm_read or 0) + (op.bytes_hbm_written or 0)
        through_pipe = bytes_hbm / schedule.bytes_per_cycle
        if op.cycles and op.priced_by == "compiler":
            through_pipe = min(through_pipe, op.cycles)  # its bytes are an upper bound
        if op.cycles is not None:
            pipe += op.count * through_pipe
        if op.cycles is None:
            unpriced.append(Unpriced(op.name, op.opcode, op.op_name, op.count, op.bytes_moved))
            continue
        if not op.cycles:
            continue
        by_kind[op.kind] = by_kind.get(op.kind, 0.0) + op.count * op.cycles
        if op.priced_by == "bandwidth":
            by_bandwidth += op.count * op.cycles
    # What runs beside the rest still goes through the one pipe of HBM.
    waiting = max(0.0, pipe - sum(by_kind.values()))
    if waiting:
        by_kind["copy"] = by_kind.get("copy", 0.0) + waiting
    return Summary(
        cycles=sum(by_kind.values()),
        cycles_by_kind=by_kind,
        cycles_not_from_the_compiler=by_bandwidth,
        bytes_hbm_read=read,
        bytes_hbm_written=written,
        unpriced=tuple(unpriced),
        assumptions=tuple(_assumptions(schedule, unpriced, waiting)),
    )


def _assumptions(schedule: Schedule, unpriced: list[Unpriced], waiting: float) -> list[str]:
    ops: list[Op] = [op for op in schedule.ops if op.count]
    simulated = sum(op.compiler_cycles is not None for op in ops)
    priced = sum(op.priced_by == "compiler" and bool(op.cycles) for op in ops)
    said = ["operations run one after the other"]
    if simulated:
        said.append(f"of XLA's operations, {simulated} simulated from their bundles")
    if priced:
        said.append(f"of XLA's operations, {priced} at the compiler's estimated_cycles")
    if any(op.opcode.endswith("-start") for op in ops):
        said.append(ASSUMPTIONS[schedule.overlap])
    if waiting:
        said.append(
            f"HBM is busy for {waiting:,.0f} cycles more than all operations together, which are "
            "added"
        )
    if any(op.priced_by == "bandwidth" and not op.opcode.endswith("-start") for op in ops):
        said.append(
            "copies that the compiler gives no cycles take their bytes over the HBM bandwidth, "
            f"{schedule.bytes_per_cycle:.0f} bytes a cycle"
        )
    if any(op.kind == "collective" and op.opcode == "fusion" for op in ops):
        said.append(
            "fusions that go on with a collective take the compiler's cycles; whether those count "
            "the links is not known"
        )
    if schedule.trip_counts:
        said.append("a loop's own overhead, a few scalar instructions a pass, is not counted")
    said += [f"stated by the caller: {text}" for text in schedule.stated]
    for thread in sorted({op.thread for op in ops if op.thread}):
        said.append(
            f"what the {thread} does runs beside the TensorCore, without a price, and is never "
            "waited for"
        )
    if unpriced:
        collectives = sum(u.count for u in unpriced if _is_collective(schedule, u.name))
        others = sum(u.count for u in unpriced) - collectives
        parts = [f"{collectives} collectives"] * bool(collectives)
        parts += [f"{others} other operations"] * bool(others)
        said.append(
            f"{' and '.join(parts)} have no price and add nothing, so the sum is a lower bound"
        )
    return said


def _is_collective(schedule: Schedule, name: str) -> bool:
    return any(op.name == name and op.kind == "collective" for op in schedule.ops)
