"""The operations a module runs, in schedule order, loops and branches flattened.

A loop's body counts its trip count times, its condition once more. A TPU core runs the schedule
one operation after the other; what may run beside it, asynchronous copies and collectives, is a
stated assumption, not a simulation.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from smalti.estimate.errors import DumpUnreadable, Unstated
from smalti.estimate.module.hlo import Instruction, Module
from smalti.estimate.module.loops import trip_count
from smalti.estimate.module.prices import KERNEL, Kind, Overlap, PricedBy, price
from smalti.estimate.module.traffic import bytes_touched
from smalti.estimate.module.values import Frame, Values

ASSUMPTIONS = {
    "none": "asynchronous copies overlap with nothing: each adds its bytes over the HBM bandwidth",
    "full": "asynchronous copies overlap fully with what stands beside them: their starts and "
    "waits are free",
}


@dataclass(frozen=True)
class Op:
    """One operation of the schedule. Cycles and bytes are those of one execution."""

    name: str  # of the HLO instruction, without its %
    opcode: str
    kind: Kind
    priced_by: PricedBy  # "nobody": its cycles are None and stay so
    cycles: float | None  # None too for a kernel until its simulation is filled in
    count: int  # how often it runs: the product of the trip counts around it
    bytes_hbm_read: int | None  # an upper bound; None for a kernel until filled in
    bytes_hbm_written: int | None
    bytes_moved: int  # of what nobody prices: the larger of what it reads and what it writes
    path: tuple[str, ...]  # the loops, branches and calls around it, outermost first
    thread: str  # "" on the TensorCore; "sparsecore" beside it, then it has no price
    op_name: str  # jax's name for where it came from
    source: tuple[str, int] | None  # file, line
    # Of a kernel: the values of its operands, None where the module does not say.
    operands: tuple[np.ndarray | None, ...] = field(default=(), compare=False, repr=False)
    # Of an operation of XLA's that was simulated instead: the compiler's estimated_cycles.
    compiler_cycles: float | None = None


@dataclass(frozen=True)
class Schedule:
    """All operations of a module, and what was assumed to list them."""

    ops: tuple[Op, ...]
    overlap: Overlap
    bytes_per_cycle: float
    trip_counts: dict[str, int]  # of every loop entered, read or stated
    stated: tuple[str, ...]  # what the caller stated, in words

    @property
    def kernels(self) -> tuple[Op, ...]:
        """The TensorCore's Pallas kernels, in order; one in a loop stands once, with its count."""
        return tuple(op for op in self.ops if op.kind == "kernel" and not op.thread)

    def with_kernel(
        self, name: str, cycles: float, bytes_hbm_read: int, bytes_hbm_written: int
    ) -> "Schedule":
        """A copy in which the kernel of that name has these cycles and bytes per execution."""
        if not any(op.name == name for op in self.kernels):
            raise ValueError(_no_such("kernel", name, [op.name for op in self.kernels]))
        ops = tuple(
            replace(
                op,
                cycles=cycles,
                bytes_hbm_read=bytes_hbm_read,
                bytes_hbm_written=bytes_hbm_written,
            )
            if op.kind == "kernel" and op.name == name
            else op
            for op in self.ops
        )
        return replace(self, ops=ops)


def schedule(
    module: Module,
    *,
    bytes_per_cycle: float,
    overlap: Overlap,
    trip_counts: Mapping[str, int] | None = None,
    branches: Mapping[str, int] | None = None,
    kernels: Collection[str] = (),
) -> Schedule:
    """Lists what a module runs.

    Args:
        bytes_per_cycle: HBM bandwidth over the clock, for copies that the compiler gives no cycles.
        overlap: "none" or "full", see ASSUMPTIONS.
        trip_counts: by the name of a `while`, for loops whose count is not in the program.
        branches: by the name of a `conditional`, which branch runs, from 0; of one on a boolean,
            1 is true.

        kernels: names of operations that are to be simulated, beside the Pallas kernels that stand
            alone: fusions around one.

    Raises:
        ValueError: a stated name that is not in the module, or a value out of range, or a count
            that the module contradicts.
        Unstated: a loop or branch that depends on data and is not stated.
        UnknownOperation, DumpUnreadable: see `price` and `read_module`.
    """
    if overlap not in ASSUMPTIONS:
        raise ValueError(f"overlap is {overlap!r}; allowed are 'none' and 'full'")
    if not bytes_per_cycle > 0:
        raise ValueError(f"bytes_per_cycle is {bytes_per_cycle!r}; it must be above 0")
    trip_counts, branches = dict(trip_counts or {}), dict(branches or {})
    _check_names("trip_counts", "loop", trip_counts, module.of_opcode("while"))
    _check_names("branches", "conditional", branches, module.of_opcode("conditional"))
    for name, count in trip_counts.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"trip_counts[{name!r}] is {count!r}; it must be a number from 0 on")
    walk = _Walk(module, bytes_per_cycle, overlap, trip_counts, branches, kernels)
    walk.enter(Frame(module.entry), 1, ())
    stated = [f"%{name} runs {count} times" for name, count in trip_counts.items()]
    stated += [f"%{name} takes branch {branch}" for name, branch in branches.items()]
    return Schedule(tuple(walk.ops), overlap, bytes_per_cycle, walk.counts_read, tuple(stated))


@dataclass
class _Walk:
    module: Module
    bytes_per_cycle: float
    overlap: Overlap
    trip_counts: dict[str, int]
    branches: dict[str, int]
    kernels: Collection[str]
    ops: list[Op] = field(default_factory=list)
    counts_read: dict[str, int] = field(default_factory=dict)
    thread: str = ""

    def __post_init__(self):
        self.values = Values(self.module)

    def enter(self, frame: Frame, count: int, path: tuple[str, ...]) -> None:
        for i in frame.computation.instructions:
            if i.opcode == "while":
                self._loop(frame, i, count, path)
            elif i.opcode == "conditional":
                branch = self._branch(i)
                inside = self.values.enter(frame, i, self._branches_of(i)[branch], branch)
                self.enter(inside, count, (*path, f"{i.name}[{branch}]"))
            elif i.opcode in ("call", "call-start", "async-start") and i.called:
                inside = self.values.enter(frame, i, i.called[0])
                outside, self.thread = self.thread, _thread_of(i) or self.thread
                self.enter(inside, count, (*path, i.name))
                self.thread = outside
            else:
                self._leaf(frame, i, count, path)

    def _leaf(self, frame: Frame, i: Instruction, count: int, path: tuple[str, ...]) -> None:
        if i.name in self.kernels:
            cost = KERNEL
        else:
            cost = price(self.module, frame.computation, i, self.bytes_per_cycle, self.overlap)
        if self.thread and cost.priced_by != "free":
            moved = max(bytes_touched(self.module, frame.computation, i, None))
            cost = replace(cost, priced_by="nobody", cycles=None, bytes_moved=moved)
        operands: tuple[np.ndarray | None, ...] = ()
        if cost.kind == "kernel":
            operands = tuple(self.values.constant(frame, name) for name in i.operands)
        self.ops.append(
            Op(
                i.name,
                i.opcode,
                cost.kind,
                cost.priced_by,
                cost.cycles,
                count,
                cost.bytes_hbm_read,
                cost.bytes_hbm_written,
                cost.bytes_moved,
                path,
                self.thread,
                i.op_name,
                self.module.source(i),
                operands,
            )
        )

    def _loop(self, frame: Frame, i: Instruction, count: int, path: tuple[str, ...]) -> None:
        stated = self.trip_counts.get(i.name)
        try:
            trips = trip_count(self.values, frame, i)
        except Unstated:
            if stated is None:
                raise
            trips = stated
        if stated is not None and stated != trips:
            raise ValueError(
                f"trip_counts[{i.name!r}] is {stated}, but the program runs the loop {trips} "
                "times: leave it out"
            )
        self.counts_read[i.name] = trips
        path = (*path, i.name)
        condition, body = (i.attributes[key].lstrip("%") for key in ("condition", "body"))
        self.enter(self.values.enter(frame, i, condition), count * (trips + 1), path)
        if trips:
            self.enter(self.values.enter(frame, i, body), count * trips, path)

    def _branches_of(self, i: Instruction) -> tuple[str, ...]:
        if "branch_computations" in i.attributes:
            return i.called
        names = i.calls("false_computation"), i.calls("true_computation")
        if names[0] is None or names[1] is None:
            raise DumpUnreadable(f"line {i.line} of the HLO text: %{i.name} names no branches")
        return names[0], names[1]

    def _branch(self, i: Instruction) -> int:
        many = len(self._branches_of(i))
        where = f" ({i.op_name})" if i.op_name else ""
        if i.name not in self.branches:
            raise Unstated(
                f"which of its {many} branches the conditional %{i.name}{where} takes is not in "
                f'the program. State it: branches={{"{i.name}": 0}}'
            )
        branch = int(self.branches[i.name])
        if not 0 <= branch < many:
            raise ValueError(
                f"branches[{i.name!r}] is {branch}; %{i.name} has branches 0 to {many - 1}"
            )
        return branch


def _thread_of(i: Instruction) -> str:
    thread = i.attributes.get("async_execution_thread", "").strip('"')
    return "" if thread == "main" else thread


def _check_names(
    argument: str, what: str, stated: Mapping[str, int], there: list[Instruction]
) -> None:
    names = [i.name for i in there]
    for name in stated:
        if name not in names:
            raise ValueError(f"{argument}: {_no_such(what, name, names)}")


def _no_such(what: str, name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    if close:
        hint = f"did you mean {close[0]!r}?"
    elif names:
        hint = f"there are {', '.join(repr(other) for other in names)}"
    else:
        hint = f"it has no {what} at all"
    return f"no {what} of the module is called {name!r}; {hint}"
