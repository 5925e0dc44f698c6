"""What one operation of a module costs, and who says so.

The TPU compiler writes `estimated_cycles` for fusions, convolutions, relayout copies, broadcasts
and the like. It writes none for what is listed here by name; any other operation without cycles is
an UnknownOperation, so that a compiler which changes its text is noticed.
"""

from dataclasses import dataclass
from typing import Literal

from smalti.estimate.errors import UnknownOperation
from smalti.estimate.module.hlo import Computation, Instruction, Module
from smalti.estimate.module.shapes import HBM, HOST, Shape
from smalti.estimate.module.traffic import bytes_touched

Kind = Literal["xla", "kernel", "copy", "collective", "free"]
PricedBy = Literal["compiler", "bandwidth", "simulation", "free", "nobody"]
Overlap = Literal["none", "full"]

# They name values and do nothing at run time.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "add-dependency", "domain", "partition-id", "replica-id", "opt-barrier",
    "get-dimension-size",
}  # fmt: skip
# Custom calls of the compiler itself that only name or join buffers.
FREE_TARGETS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"}
# On single numbers the scalar core does these in a few cycles.
SCALAR = {
    "abs", "add", "and", "clamp", "compare", "convert", "copy", "divide", "is-finite", "maximum",
    "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "remainder", "select",
    "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "subtract", "xor",
    "reshape", "broadcast", "count-leading-zeros", "bitcast-convert", "sqrt", "rsqrt", "cbrt",
    "exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "sine",
    "cosine", "floor", "ceil", "round-nearest-even", "round-nearest-afz",
}  # fmt: skip
# They move bytes and compute nothing.
MOVES = {
    "copy", "dynamic-slice", "dynamic-update-slice", "slice", "concatenate",
}  # fmt: skip
COLLECTIVES = {
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
}  # fmt: skip
# Seen without cycles in modules of libtpu 0.0.42 and 0.0.50; their time is not known here.
UNPRICED = {
    "sort", "reshape", "reverse", "reduce-window", "gather", "scatter", "rng-bit-generator",
    "custom-call",
}  # fmt: skip
KERNEL_TARGET = "tpu_custom_call"


@dataclass(frozen=True)
class Price:
    """Of one execution. Bytes are None for a kernel: its simulation counts them."""

    kind: Kind
    priced_by: PricedBy
    cycles: float | None
    bytes_hbm_read: int | None
    bytes_hbm_written: int | None
    bytes_moved: int = 0  # of what nobody prices: the larger of what it reads and what it writes


KERNEL = Price("kernel", "simulation", None, None, None)


def price(
    module: Module,
    computation: Computation,
    i: Instruction,
    bytes_per_cycle: float,
    overlap: Overlap,
) -> Price:
    """The price of a leaf: not of a loop, a conditional or a call.

    Raises UnknownOperation, naming the operation, where no rule covers it.
    """
    if i.opcode == "custom-call" and i.target == KERNEL_TARGET:
        return KERNEL
    if i.opcode in FREE or (i.opcode == "custom-call" and i.target in FREE_TARGETS):
        return Price("free", "free", 0.0, 0, 0)
    operands = [computation.by_name[name].shape for name in i.operands]
    if i.opcode.endswith("-done") or i.opcode.endswith("-update"):
        return Price(_kind_of_async(i), "free", 0.0, 0, 0)
    if i.opcode.endswith("-start"):
        return _price_start(i, operands, bytes_per_cycle, overlap)
    read, written = bytes_touched(module, computation, i, HBM)
    if i.cycles is not None:
        kind = "copy" if i.opcode == "copy" else "xla"
        return Price(kind, "compiler", float(i.cycles), read, written)
    kind: Kind = "xla"
    if i.opcode in COLLECTIVES or _holds_collective(module, i):
        if _waits(module, i):
            return Price("collective", "free", 0.0, 0, 0)
        kind = "collective"
    if i.opcode in SCALAR and all(_is_number(shape) for shape in (*operands, i.shape)):
        return Price("free", "free", 0.0, 0, 0)
    if i.opcode in MOVES and not any(
        leaf.space == HOST for shape in (*operands, i.shape) for leaf in shape.leaves
    ):
        cycles = max(read + written, _moved(i, operands)) / bytes_per_cycle
        return Price("copy", "bandwidth", cycles, read, written)
    custom_fusion = i.opcode == "fusion" and i.attributes.get("kind") == "kCustom"
    if kind == "collective" or custom_fusion or i.opcode in UNPRICED or i.opcode in MOVES:
        moved = max(bytes_touched(module, computation, i, None))
        return Price(kind, "nobody", None, read, written, moved)
    raise UnknownOperation(
        f"%{i.name}, line {i.line} of the HLO text: a {i.opcode} of {i.shape.dtype or 'a tuple'} "
        "without estimated_cycles, and no rule says what it costs. The compiler's text may have "
        "changed: please report its libtpu version"
    )


def _kind_of_async(i: Instruction) -> Kind:
    wrapped = i.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    if wrapped in COLLECTIVES:
        return "collective"
    if wrapped in MOVES:
        return "copy"
    # What an asynchronous call calls is entered where it starts.
    if wrapped in ("async", "call") and not i.opcode.endswith("-start"):
        return "free"
    raise UnknownOperation(
        f"%{i.name}, line {i.line} of the HLO text: the asynchronous operation {i.opcode} is "
        "not known"
    )


def _price_start(
    i: Instruction, operands: list[Shape], bytes_per_cycle: float, overlap: Overlap
) -> Price:
    kind = _kind_of_async(i)
    taken = sum(shape.stored_bytes for shape in operands)
    if kind == "collective":
        read = sum(shape.stored_in(HBM) for shape in operands)
        written = _result(i).stored_in(HBM)
        moved = max(taken, _result(i).stored_bytes)
        return Price(kind, "nobody", None, read, written, moved)
    amount = _moved(i, operands)
    if any(leaf.space == HOST for shape in (*operands, i.shape) for leaf in shape.leaves):
        return Price("copy", "nobody", None, 0, 0, amount)
    read = amount if operands[0].space == HBM else 0
    written = amount if _result(i).space == HBM else 0
    if i.opcode == "dynamic-update-slice-start":
        read = amount if operands[1].space == HBM else 0
    cycles = 0.0 if overlap == "full" else max(read + written, amount) / bytes_per_cycle
    return Price("copy", "bandwidth", cycles, read, written)


def _result(i: Instruction) -> Shape:
    """The result of an operation; of an asynchronous start, among its sources and flags.

    A copy-start is (result, source, context), an all-reduce-start the results alone, every other
    start (sources, result, …).
    """
    if not i.opcode.endswith("-start") or i.shape.parts is None or i.opcode == "all-reduce-start":
        return i.shape
    return i.shape.parts[0 if i.opcode == "copy-start" else 1]


def _moved(i: Instruction, operands: list[Shape]) -> int:
    """Bytes a move carries: of an update, the update; else the result."""
    if i.opcode.startswith("dynamic-update-slice"):
        return operands[1].stored_bytes
    return _result(i).stored_bytes


def _is_number(shape: Shape) -> bool:
    return shape.parts is None and shape.elements == 1


def _holds_collective(module: Module, i: Instruction) -> bool:
    """Whether it is a fusion that starts, continues or ends a collective."""
    if i.opcode != "fusion":
        return False
    return any(
        inner.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES
        for inner in module.computations[i.called[0]].instructions
    )


def _waits(module: Module, i: Instruction) -> bool:
    """Whether it is the fusion by which the compiler waits for a collective it started before."""
    return i.opcode == "fusion" and any(
        inner.target == "AsyncCollectiveDone"
        for inner in module.computations[i.called[0]].instructions
    )
