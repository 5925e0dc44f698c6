"""Hand-made listings, and what they leave in the registers."""

from collections.abc import Mapping, Sequence

import numpy as np

from smalti.chips import TENSOR_CORES
from smalti.estimate.bundles.listing import parse_listing
from smalti.estimate.bundles.utilization import HEADER, UNITS
from smalti.estimate.program import KernelDump
from smalti.estimate.simulate import Simulation, simulate
from smalti.estimate.simulate.blocks import make_blocks
from smalti.estimate.simulate.machine import Machine
from smalti.estimate.simulate.operations import REGISTERS, Addresses, Unknown
from smalti.estimate.simulate.tiling import smem_words

CAPACITY = (2, 2, 4, 2, 1, 3, 3, 2, 2, 2)
HBM = "%s0_s0 = inlined_call_operand.hbm [shape: f32[1024], index: 0, kind: input, shape index: {}]"
HBM_TABLE = (
    "%s1_s1 = inlined_call_operand.hbm [shape: s32[8], index: 1, kind: input, shape index: {}]"
)
SCALAR = (
    "%s2_s2 = inlined_call_operand.<no memory space> "
    "[shape: s32[], index: 2, kind: input, shape index: {}]"
)
VMEM = "%s3_s3 = inlined_call_operand.vmem [shape: f32[8], index: 3, kind: input, shape index: {}]"


def text(bundles: Sequence[str]) -> str:
    """A listing whose n-th bundle holds `bundles[n]`: its operations, and comments behind //."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    for address, bundle in enumerate(bundles):
        operations, _, comment = bundle.partition("//")
        shown = f" /* {comment.strip()} */" if comment else ""
        name = f"{address:#x}" if address else "0"
        lines.append(f"{name:>6}   :  {{ {operations.strip()} }}{shown}")
    lines[-1] += " /* exit bundle: %k.1 = custom-call(%x.1) */"
    return "\n".join(lines) + "\n"


def utilization(rows: Sequence[Sequence[int]]) -> str:
    shown = "\n".join(" ".join(map(str, row)) for row in rows)
    capacity = " ".join(map(str, CAPACITY))
    return f"{HEADER}\n{', '.join(UNITS)}\n{capacity}\n== UTILIZATION:\n{shown}\n"


def dump(bundles: Sequence[str]) -> KernelDump:
    return KernelDump("k.1", text(bundles), utilization([[0] * len(UNITS)] * len(bundles)))


def run(
    bundles: Sequence[str],
    operands: Sequence[np.ndarray | None] = (),
    chip: str = "v6e",
    branches: Mapping[int, object] | None = None,
) -> Simulation:
    return simulate(dump(bundles), TENSOR_CORES[chip], operands, branches)  # type: ignore[arg-type]


def registers_after(bundles: Sequence[str], chip: str = "v6e", **start: int) -> dict:
    """What the registers hold at the end; those not written hold `start`, or an `Unknown`."""
    listing = parse_listing(text(bundles), "k.1")
    core = TENSOR_CORES[chip]
    blocks = make_blocks(listing, core, Addresses(), {}, {})
    machine = Machine(core, 0, {}, smem_words)
    registers: dict = {name: Unknown(f"register {name}") for name in REGISTERS} | start
    at: int | None = 0
    while at is not None:
        at = blocks[at].run(machine, registers)
    return registers
