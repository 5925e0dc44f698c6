"""Turns a listing into straight-line blocks, and every block into one Python function.

A branch takes effect after its delay slots, so a block ends with those. What a block does to
registers, SMEM, sync flags and copies becomes Python source; its vector operations are counted by
the caller, as executions of the block times what a block holds.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smalti.chips import TensorCore
from smalti.estimate.bundles.listing import Bundle, Listing, Operation
from smalti.estimate.errors import DumpUnreadable, UnknownOperation
from smalti.estimate.simulate import operations
from smalti.estimate.simulate.operations import Addresses, address, register, term


@dataclass(frozen=True)
class Block:
    start: int
    stop: int  # the address after its last bundle
    run: Callable  # (machine, registers) → the next block's address, or None at the exit
    mxu_cycles: dict[int, float]  # of work for each MXU, by its number
    bundles: int  # that one run executes, with the empty ones that the listing leaves out
    cycles: float  # that it takes, waits for copies apart


def delay_slots(listing: Listing, branch: int, target: int, core: TensorCore) -> int:
    """How many bundles after the branch at address `branch` run whether it is taken or not.

    target: where it goes. Listings of v7x may write the empty slots at the end as a single bundle,
    and then leave out the comments there, so that fewer bundles may stand for all slots. Operations
    that were moved up into them, from where the branch does not go, bear its condition.
    """
    slots = core.branch_delay_slots
    if not core.packs_empty_slots:
        if branch + 1 + slots in listing.boundaries:
            return slots
        raise DumpUnreadable(
            f"{listing.op}: no region ends {slots} bundles after the branch at {branch:#x}, as it "
            f"does on {core.chip}; the format of this libtpu is not known"
        )
    hoisted = _hoisted(listing.bundles[branch])
    packed = []
    for n in range(1, slots + 1):
        at = branch + n
        if at in listing.starts or at >= len(listing.bundles):
            break
        if not listing.bundles[at].operations:
            packed.append(n)
        if hoisted and any(hoisted in o.text for o in listing.bundles[at].operations):
            packed = []
        # With the slots ends a region around the branch, which does not go on to the target.
        if any(
            target <= listing.regions.get(region, -1) <= branch
            if target <= branch
            else listing.regions.get(region, at) <= branch and at + 1 < target
            for region in listing.ended_at(at)
        ):
            packed = [m for m in packed if m >= n]
            if n == slots:
                return slots
    else:
        if not any(not b.operations for b in listing.bundles[branch + 1 : branch + 1 + slots]):
            return slots
    if len(packed) == 1:
        return packed[0]
    raise DumpUnreadable(
        f"{listing.op}: it cannot be told where the delay slots of the branch at {branch:#x} end; "
        "the format of this libtpu is not known"
    )


def _hoisted(bundle: Bundle) -> str | None:
    """How the operations are written that take place where the bundle's branch is not taken."""
    for operation in bundle.operations:
        if operation.opcode == "sbr.rel" and operation.predicate:
            name = operation.predicate.removeprefix("!")
            return f"({name})" if operation.predicate.startswith("!") else f"(!{name})"
    return None


_MXU = re.compile(r"\.mxu(\d)")
# Rows of a register, by element. An operation that names two types takes the first and works in the
# second; one without a type in its name takes whole words.
_ROWS = {"f32": 8, "bf16": 16, "s8": 32, "u8": 32, "bf8": 32}
_ROWS |= {"f8e4m3": 32, "f8e4m3fn": 32, "f8e4m3b11": 32, "f8e5m2": 32}
# What else an operation's name may say, and does not change how long it takes. "lmr.….16": the left
# operand comes transposed from a matrix register, its rows 16 as they are of two-byte types.
_MXU_WORDS = frozenset(
    ("mubr", "subr", "gmra", "msra", "msrb", "vlgmr", "xpose", "msk", "hi", "low", "dwg", "lsf")
) | {"mrb", "mxu0", "mxu1", "mxu2", "mxu3", "lmr", "16"}


def mxu_cycles(bundles: Sequence[Bundle], core: TensorCore) -> dict[int, float]:
    """How long each MXU is busy with the products and weights that the bundles give it."""
    busy: dict[int, float] = {}
    for bundle in bundles:
        for operation in bundle.operations:
            opcode = operation.opcode
            if not opcode.startswith(("vmatmul", "vmatpush")):
                continue
            unit = _MXU.search(operation.text)
            words = opcode.split(".")[1:]
            kinds = [word for word in words if word in _ROWS]
            rows = _ROWS[kinds[0]] if kinds else 8
            if unit is None or len(kinds) > 2 or not {*words} <= {*_MXU_WORDS, *kinds}:
                raise UnknownOperation(
                    f"bundle {bundle.address:#x} holds the operation {opcode!r}, of which it is "
                    f"not known how long an MXU takes for it: {operation.text[:120]}"
                )
            cycles = rows / core.mxu_rows_per_cycle
            if kinds and kinds[0].startswith(core.mxu_doubles):
                cycles /= 2
            if opcode.startswith("vmatpush"):
                cycles *= core.mxu_push_share
            number = int(unit[1])
            busy[number] = busy.get(number, 0.0) + cycles
    return busy


def make_blocks(
    listing: Listing,
    core: TensorCore,
    addresses: Addresses,
    operands: Mapping[int, int | object],
    stated: Mapping[int, object],
) -> dict[int, Block]:
    """Blocks by start address.

    operands: the value that each operand's register holds at the start, by index: an address, or
        what a 0-d operand is.
    stated: branches that the caller decides, by address.
    """
    branches: dict[int, Operation] = {}
    for bundle in listing.bundles:
        for operation in bundle.operations:
            if operation.opcode == "sbr.rel":
                if bundle.address in branches:
                    raise DumpUnreadable(f"{listing.op}: bundle {bundle.address:#x} branches twice")
                branches[bundle.address] = operation
    targets = {at: listing.address_of(_target(branch), at) for at, branch in branches.items()}
    slots = {at: delay_slots(listing, at, targets[at], core) for at in branches}
    ends = {at + 1 + slots[at]: at for at in branches}
    starts = {0, *ends, *targets.values()}
    for at in branches:
        inside = range(at + 1, at + 1 + slots[at])
        if starts.intersection(inside) or branches.keys() & set(inside):
            raise UnknownOperation(
                f"{listing.op}: a branch goes into, or stands in, the delay slots of the branch at "
                f"{at:#x}"
            )
    edges = sorted(starts | {len(listing.bundles)})
    blocks = {}
    for start, stop in itertools.pairwise(edges):
        if start == len(listing.bundles):
            continue
        at = ends.get(stop)
        bundles = listing.bundles[start:stop]
        count = len(bundles) + (0 if at is None else core.branch_delay_slots - slots[at])
        busy = mxu_cycles(bundles, core)
        # The schedule may ask an MXU for more than it can do: then the bundles wait for it.
        cycles = max([float(count), *busy.values()])
        writer = _Writer(listing, addresses, operands, stated)
        following = stop if at is None else targets[at]
        run = writer.compile(bundles, None if at is None else branches[at], following, cycles)
        blocks[start] = Block(start, stop, run, busy, count, cycles)
    return blocks


def _target(branch: Operation) -> str:
    return branch.arguments[-1].rpartition("=")[2].strip() if branch.arguments else ""


def operand_index(operation: Operation) -> int:
    """Which operand an `inlined_call_operand` is. Raises ValueError where it is not written."""
    return int(operation.text.partition("index:")[2].split(",")[0])


def _token(operation: Operation) -> str:
    """`%551`, by which an operation's results are taken out of their queue."""
    return operation.text.partition("=")[0].strip()


class _Writer:
    """Writes the Python function of one block."""

    def __init__(self, listing, addresses, operands, stated):
        self.listing, self.addresses, self.operands = listing, addresses, operands
        self.stated = stated
        self.lines: list[str] = []
        self.read: dict[str, None] = {}  # registers read before they are written here
        self.written: dict[str, None] = {}
        self.constants: dict[str, object] = {}

    def compile(self, bundles: tuple[Bundle, ...], branch, target: int, cycles: float):
        """target: where `branch` goes, or without one, what follows."""
        for bundle in bundles:
            self._bundle(bundle, bundle.address - bundles[0].address)
        # The kernel ends behind the last bundle.
        count = len(self.listing.bundles)
        stop = bundles[-1].address + 1
        chosen, following = (str(at) if at < count else "None" for at in (target, stop))
        if branch is not None and branch.predicate is not None:
            # The condition was kept when the branch's bundle was reached.
            chosen = f"{chosen} if taken else {following}"
        body = [f"{name} = R[{name!r}]" for name in self.read]
        body += ["t = m.time", *self.lines]
        body += [f"R[{name!r}] = {name}" for name in self.written]
        body += [f"m.time = t + {cycles}", f"return {chosen}"]
        source = "def run(m, R):\n    " + "\n    ".join(body)
        scope: dict = {**vars(operations), **self.constants}
        exec(compile(source, f"<{self.listing.op} {bundles[0].address:#x}>", "exec"), scope)
        return scope["run"]

    def _bundle(self, bundle: Bundle, offset: int) -> None:
        self.where = f"{self.listing.op}: bundle {bundle.address:#x}"
        values: list[tuple[str, str]] = []
        effects: list[str] = []
        for operation in bundle.operations:
            if operation.is_vector:
                continue
            try:
                self._operation(operation, bundle.address, offset, values, effects)
            except (IndexError, KeyError, ValueError) as error:
                raise DumpUnreadable(
                    f"{self.where}: {operation.text[:120]!r} is not written as that operation was "
                    "in libtpu 0.0.50; the dump is damaged, or of a newer libtpu"
                ) from error
        # All of a bundle reads what was there before it.
        names = [name for name, _ in values]
        if len(set(names)) != len(names):
            raise DumpUnreadable(f"{self.where} writes one register twice")
        expressions = [expression for _, expression in values]
        if values and effects:
            held = ", ".join(f"_{name}" for name in names)
            self.lines.append(f"{held} = {', '.join(expressions)}")
            self.lines += effects
            self.lines.append(f"{', '.join(names)} = {held}")
        elif values:
            self.lines.append(f"{', '.join(names)} = {', '.join(expressions)}")
        else:
            self.lines += effects
        for name in names:
            self.written.setdefault(name)

    def _operation(self, operation: Operation, at: int, offset: int, values, effects) -> None:
        opcode = operation.opcode
        if opcode in operations.RENAMES or opcode in operations.NOTHING:
            return
        if opcode.startswith(operations.NOTHING_PREFIXES):
            return
        if operation.destination is not None:
            self._value(operation, at, values)
            return
        if opcode == "shalt.err":
            condition = "True" if operation.predicate is None else self._term(operation.predicate)
            check = " ".join(operation.note.split())[:80]
            effects.append(f"m.halt_if({condition}, {at}, {check!r})")
            return
        effect = self._effect(operation, at, offset)
        if operation.predicate is None or opcode in ("sbr.rel", "sst"):
            effects.append(effect)
        else:
            effects.append(f"if {self._term(operation.predicate)}: {effect}")

    def _value(self, operation: Operation, at: int, values) -> None:
        opcode, arguments = operation.opcode, operation.arguments
        name = register(operation.destination or "")
        if name is None:
            raise UnknownOperation(f"{self.where}: what register is {operation.destination!r}?")
        predicate = operation.predicate and self._term(operation.predicate)
        if opcode == "smov" and arguments[0].startswith("("):
            # smov (%p, old), new: a move where p holds, else the old value of the same register.
            condition, _, old = arguments[0].strip("()").partition(",")
            predicate, kept = self._term(condition.strip()), self._term(old.strip())
            expression = self._term(arguments[1])
        else:
            kept = None
            if opcode.startswith("inlined_call_operand"):
                expression = self._operand(operation)
            elif operation.is_core_id:
                expression = "m.core_id"
            elif opcode == "sld":
                expression = f"m.load({self._address(arguments[0])})"
            elif opcode == "spop":
                why = f"a value that came out of a vector register at bundle {at:#x}"
                self.constants[f"popped_{at}"] = operations.Unknown(why)
                expression = f"popped_{at}"
            elif opcode in ("spop.drf", "vpop.sfrf"):
                expression = f"m.pop({arguments[0]!r})"
            elif opcode in operations.FLOATS or opcode in operations.FLOAT_COMPARISONS:
                bit = "Bit" if opcode in operations.FLOAT_COMPARISONS else ""
                expression = f"Unknown{bit}('a number in floating point, from bundle {at:#x}')"
            elif opcode in operations.EXPRESSIONS:
                expression = self._expression(operation)
            else:
                raise UnknownOperation(
                    f"{self.where} holds the operation {opcode!r}, which is not known: "
                    f"{operation.text[:120]}"
                )
        if predicate is not None:
            kept = kept or self._read(name)
            expression = operations.choose(predicate, expression, kept)
        values.append((name, expression))

    def _expression(self, operation: Operation) -> str:
        opcode = operation.opcode
        arguments = list(operation.arguments)
        if opcode.startswith("scalar_lea"):
            # `scalar_lea.hbm %s1, 16 [#allocation9]` names the base again, as a comment would.
            arguments = [argument.split(" [#")[0] for argument in arguments]
        terms = [self._term(argument) for argument in arguments]
        self._count(opcode, terms, len(set(re.findall(r"{\d}", operations.EXPRESSIONS[opcode]))))
        if opcode == "scalar_select":
            return operations.choose(*terms)
        if opcode in ("sshll.u32", "sshrl.u32") and terms[1].isdecimal() and int(terms[1]) < 32:
            shift = "<<" if opcode == "sshll.u32" else ">>"
            return f"({terms[0]} {shift} {terms[1]}) & {operations.WORD}"
        return operations.EXPRESSIONS[opcode].format(*terms)

    def _count(self, opcode: str, terms: Sequence[str], *wanted: int) -> None:
        if len(terms) not in wanted:
            raise UnknownOperation(
                f"{self.where}: {opcode} has {len(terms)} operands, not "
                + " or ".join(map(str, wanted))
            )

    def _effect(self, operation: Operation, at: int, offset: int) -> str:
        opcode, arguments = operation.opcode, operation.arguments
        if opcode == "sbr.rel":
            if at in self.stated:
                self.constants["stated"] = self.stated
                return f"taken = stated[{at}]()"
            if operation.predicate is None:
                return "taken = True"
            return f"taken = bool({self._term(operation.predicate)})"
        if opcode == "sst":
            place, value = self._address(arguments[0]), self._term(arguments[1])
            if operation.predicate is None:
                return f"m.store({place}, {value})"
            return f"m.store_if({self._term(operation.predicate)}, {place}, {value})"
        if opcode == "vsyncpa":
            return f"m.set_flag({self._term(arguments[0])}, {self._term(arguments[1])})"
        if opcode == "vsyncadd":
            return f"m.add_flag({self._term(arguments[0])}, {self._term(arguments[1])})"
        if opcode in ("dma.done.wait", "vwait.ge", "vwait.ge.trace"):
            flag, least = (self._term(argument) for argument in arguments)
            return f"t += m.wait(t + {offset}, {at}, {flag}, {least})"
        if opcode == "vsyncmov":
            (flag,) = (self._term(argument) for argument in arguments)
            return f"m.push({_token(operation)!r}, m.read_flag(t + {offset}, {flag}))"
        if opcode == "sdivrem.u32":
            a, b = (self._term(argument) for argument in arguments)
            kinds = {"kDivAndRem": "", "kDiv": "[:1]", "kRem": "[1:]"}
            (wanted,) = (kinds[note] for note in operation.note.split(" :: ") if note in kinds)
            return f"m.push({_token(operation)!r}, *quotient_and_remainder({a}, {b}){wanted})"
        if opcode.startswith("dma.") and (route := self._route(operation)):
            source, granules, destination, flag = (self._term(a) for a in arguments[:4])
            what = f"{route!r}, {source}, {granules}, {destination}, {flag}"
            return f"m.copy(t + {offset}, {at}, {what})"
        raise UnknownOperation(
            f"{self.where} holds the operation {opcode!r}, which is not known: "
            f"{operation.text[:120]}"
        )

    def _route(self, operation: Operation) -> str | None:
        route = operation.opcode.removeprefix("dma.")
        if route == "general":  # its direction is that of its pointers
            spaces = [
                self.listing.spaces.get(argument)
                for argument in (operation.arguments[0], operation.arguments[2])
            ]
            route = "_to_".join(space or "?" for space in spaces)
        memories = ("hbm", "vmem", "smem")
        known = {f"{a}_to_{b}" for a in memories for b in memories}
        # How fast v4's CMEM is, is not known; of a few scalars it does not matter.
        return route if route in known or route == "cmem_to_smem" else None

    def _operand(self, operation: Operation) -> str:
        index = operand_index(operation)
        if index not in self.operands:
            raise UnknownOperation(f"{self.where}: operand {index} is not among the kernel's")
        value = self.operands[index]
        if isinstance(value, int):
            return str(value)
        self.constants[f"operand_{index}"] = value
        return f"operand_{index}"

    def _term(self, argument: str) -> str:
        name = register(argument)
        if name is not None:
            self._read(name)
        return term(argument, self.addresses, self.where)

    def _address(self, argument: str) -> str:
        for word in argument.replace("[", " ").replace("]", " ").replace("smem:", " ").split():
            if name := register(word):
                self._read(name)
        return address(argument, self.addresses, self.where)

    def _read(self, name: str) -> str:
        if name not in self.written:
            self.read.setdefault(name)
        return name
