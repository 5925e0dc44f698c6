"""The part of a TensorCore that a schedule leaves open: memory, sync flags, and when copies end.

The time model: one bundle a cycle, and a wait where a copy has not arrived. All copies to and from
HBM share one pipe of the chip's bandwidth; a copy ends `latency` after its last byte left the pipe.
"""

from dataclasses import dataclass, field
from typing import Any

from smalti.chips import TensorCore
from smalti.estimate.errors import SimulationFailed, Unstated
from smalti.estimate.simulate.operations import SIGN, WORD, Unknown

TIMELINE_LIMIT = 20_000
SMEM_LIMIT_BYTES = 1 << 23  # more than any chip has
# Operands stand from here to its double. Pointers to them are these `<< 4`, and so no such numbers.
LOWEST_ADDRESS = 1 << 25
VMEM_ADDRESS_BYTES = 512  # the unit of an address


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy, in cycles from the kernel's start."""

    address: int  # of the bundle that starts it
    route: str  # "hbm_to_vmem"
    bytes: int
    issued: float
    done: float


@dataclass(frozen=True, slots=True)
class Wait:
    address: int
    start: float
    cycles: float


@dataclass
class _Flag:
    value: Any = 0  # or Unknown
    pending: list[tuple[float, int]] = field(default_factory=list)  # (done, granules), in order
    unwaited: int = 0  # granules of copies that nobody has waited for


class Machine:
    """What `simulate` runs a kernel's blocks on. Times are in cycles."""

    def __init__(self, core: TensorCore, core_id: int, operands: dict[int, object], smem_of):
        self.core = core
        self.core_id = core_id  # which of the cores that share a kernel this is
        self.time = 0.0
        self.memory: dict[int, object] = {}  # SMEM words by address
        self.flags: dict[int, _Flag] = {}
        self.pipe_free = 0.0
        self.cycles_waiting = 0.0
        self.bytes: dict[str, int] = {}
        self.copies: dict[str, int] = {}
        self.timeline: list[Copy | Wait] = []
        self._queues: dict[str, list[object]] = {}  # results not taken yet, by what they are of
        self._operands = operands  # base address → operand, for copies into SMEM
        self._smem_of = smem_of

    def load(self, address):
        if isinstance(address, Unknown):
            return address
        found = self.memory.get(address)
        if found is None:
            return Unknown(f"the SMEM word at {address:#x}, which nothing has written")
        return found

    def store(self, address, value):
        if isinstance(address, Unknown):
            raise Unstated(f"a store to SMEM goes to an address that is {address.why}")
        self.memory[address] = value

    def store_if(self, condition, address, value):
        if isinstance(condition, Unknown):
            value = condition
        elif not condition:
            return
        self.store(address, value)

    def flag(self, flag) -> _Flag:
        if isinstance(flag, Unknown):
            raise Unstated(f"a sync flag is chosen by {flag.why}")
        return self.flags.setdefault(flag, _Flag())

    def set_flag(self, flag, value):
        found = self.flag(flag)
        if found.unwaited:
            raise SimulationFailed(
                f"a sync flag is reset while {found.unwaited * self.core.granule_bytes} bytes that "
                "were copied on it have not been waited for"
            )
        found.value = value if isinstance(value, Unknown) else (value ^ SIGN) - SIGN
        found.pending.clear()

    def add_flag(self, flag, value):
        found = self.flag(flag)
        found.value += (value ^ SIGN) - SIGN

    def read_flag(self, now, flag):
        """The flag as a word; it holds the copies that have arrived by now."""
        found = self.flag(flag)
        arrived = sum(granules for done, granules in found.pending if done <= now)
        return (found.value + arrived) & WORD

    def push(self, of, *values):
        self._queues.setdefault(of, []).extend(values)

    def pop(self, of):
        queue = self._queues.get(of)
        if not queue:
            raise SimulationFailed(f"a result of {of} is taken that is not there")
        return queue.pop(0)

    def copy(self, now, address, route, source, granules, destination, flag):
        """Starts a copy; returns nothing: its flag rises when it is done."""
        if isinstance(granules, Unknown):
            raise Unstated(f"the size of a copy is {granules.why}")
        size = granules * self.core.granule_bytes
        self.bytes[route] = self.bytes.get(route, 0) + size
        self.copies[route] = self.copies.get(route, 0) + 1
        if "hbm" in route:
            start = max(now, self.pipe_free)
            passes = route.count("hbm")  # within HBM a byte is read and written
            self.pipe_free = start + passes * size / self.core.hbm_bytes_per_cycle
            done = self.pipe_free + self.core.dma_latency_cycles
        else:
            done = now + self.core.dma_latency_cycles
        if route.endswith("_to_smem"):
            self._fill_smem(route, source, size, destination)
        found = self.flag(flag)
        found.pending.append((done, granules))
        found.unwaited += granules
        if len(self.timeline) < TIMELINE_LIMIT:
            self.timeline.append(Copy(address, route, size, now, done))

    def _fill_smem(self, route, source, size, destination):
        if isinstance(destination, Unknown):
            raise Unstated(f"a copy into SMEM goes to an address that is {destination.why}")
        if size > SMEM_LIMIT_BYTES:
            raise SimulationFailed(f"a copy of {size} bytes into SMEM, which holds less")
        words: list = []
        unknown = Unknown("a word copied into SMEM from an operand whose value is not stated")
        found, units = (None, 0) if isinstance(source, Unknown) else self._operand_at(source)
        if isinstance(found, Unknown):
            unknown = unknown if units else found  # behind its start may be another's
        elif found is not None:
            bytes_per_unit = self.core.address_bytes if "hbm" in route else VMEM_ADDRESS_BYTES
            words = self._smem_of(found)[units * bytes_per_unit // 4 :]
            unknown = Unknown("a word copied into SMEM from behind the values of an operand")
        for i in range(size // 4):
            word = words[i] if i < len(words) else None
            self.memory[destination + i] = unknown if word is None else word

    def _operand_at(self, address: int) -> tuple[object, int]:
        """The operand that an address or a pointer is in, and how far behind its start; or None."""
        if address >= LOWEST_ADDRESS << 4:
            address >>= 4
        base = max((at for at in self._operands if at <= address), default=None)
        if base is None:
            return None, 0
        return self._operands[base], address - base

    def wait(self, now, address, flag, granules) -> float:
        """Cycles until the flag holds at least `granules`."""
        granules = granules if isinstance(granules, Unknown) else (granules ^ SIGN) - SIGN
        if isinstance(granules, Unknown):
            raise Unstated(f"the size of a wait is {granules.why}")
        found = self.flag(flag)
        until = now
        pending = found.pending
        while found.value < granules:
            if not pending:
                raise SimulationFailed(
                    f"the wait at bundle {address:#x} is for {granules} granules on a flag that "
                    f"holds {found.value} with no copy under way: it never ends"
                )
            done, arrived = pending.pop(0)
            found.value += arrived
            found.unwaited -= arrived
            until = max(until, done)
        # The flag holds what has arrived by then, too.
        if until > now:
            self.cycles_waiting += until - now
            if len(self.timeline) < TIMELINE_LIMIT:
                self.timeline.append(Wait(address, now, until - now))
        return until - now

    def halt_if(self, condition, address, check):
        """A check of the compiler's. One on a value that is not known is taken to pass."""
        if isinstance(condition, Unknown) or not condition:
            return
        raise SimulationFailed(
            f"the kernel halts at bundle {address:#x}, where a check of the compiler's fails: "
            + (check or "it does not say of what")
        )

    def finish(self):
        for found in self.flags.values():
            if found.unwaited:
                raise SimulationFailed(
                    f"the kernel ends with {found.unwaited * self.core.granule_bytes} bytes of "
                    "copies that nothing waits for"
                )
