"""Compiles a small kernel and checks that libtpu still writes what this package reads."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.chips import TENSOR_CORES
from smalti.estimate.compile import compile_for
from smalti.estimate.errors import DumpUnreadable, EstimateError
from smalti.estimate.module import read_module, schedule
from smalti.estimate.program import Program
from smalti.estimate.simulate import Simulation, simulate

# Versions of jax and libtpu with which all of this was tested.
TESTED = (("0.10.2", "0.0.42.1"), ("0.12.0.1", "0.0.50.1"))

_STEPS, _ROWS, _COLUMNS = 64, 4096, 128
_BYTES = _STEPS * _ROWS * _COLUMNS * 4
# Too large for any VMEM, so that every block is copied in and out.
_X = jax.ShapeDtypeStruct((_STEPS * _ROWS, _COLUMNS), jnp.float32)


@dataclass(frozen=True)
class SelfTest:
    """A self-test that passed."""

    chip: str
    versions: dict[str, str]  # jax, jaxlib, libtpu, python
    tested: bool  # whether these versions are among TESTED
    checks: tuple[str, ...]  # what was found as expected


def self_test(chip: str = "v6e", cache_dir: str | os.PathLike[str] | None = None) -> SelfTest:
    """Compile a kernel whose every figure is known, read its dumps, execute it, and compare.

    The kernel adds to 64 blocks of 4096 x 128 float32, as often as a table in SMEM says.
    chip, cache_dir: as `compile_for` takes them.

    Raises DumpUnreadable naming everything that is not as expected, and the versions that this
    was tested with; ValueError for an unknown chip; what `compile_for` raises.
    """
    table = np.arange(_STEPS, dtype=np.int32) * 5 % 7
    program = compile_for(_kernel(table), _X, chip=chip, cache_dir=cache_dir)
    versions = program.versions
    tested = (versions["jax"], versions["libtpu"]) in TESTED
    try:
        simulation = _simulated(program, table)
    except EstimateError as error:
        raise DumpUnreadable(_failure(chip, versions, [str(error)])) from error
    passed, failed = [], []
    for name, check in _CHECKS.items():
        got = check(simulation, table)
        (passed if got is None else failed).append(name if got is None else f"{name}: {got}")
    if failed:
        raise DumpUnreadable(_failure(chip, versions, failed))
    return SelfTest(chip, versions, tested, tuple(passed))


def _failure(chip: str, versions: dict[str, str], failed: list[str]) -> str:
    known = " and ".join(f"jax {jax}, libtpu {libtpu}" for jax, libtpu in TESTED)
    return (
        f"the self-test on {chip} with jax {versions['jax']}, libtpu {versions['libtpu']} failed; "
        f"estimates would be wrong (tested with {known}): " + "; ".join(failed)
    )


def _kernel(table: np.ndarray) -> Callable:
    def kernel(table, x, out):
        out[...] = x[...] * 2

        def body(_, carry):
            out[...] += 1.0
            return carry

        lax.fori_loop(0, table[pl.program_id(0)], body, 0)

    def smalti_self_test(x):
        block = pl.BlockSpec((_ROWS, _COLUMNS), lambda i, table: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=_X,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(_STEPS,), in_specs=[block], out_specs=block
            ),
        )(jnp.asarray(table), x)

    return smalti_self_test


def _simulated(program: Program, table: np.ndarray) -> Simulation:
    core = TENSOR_CORES[program.chip]
    listed = schedule(
        read_module(program.hlo), bytes_per_cycle=core.hbm_bytes_per_cycle, overlap="full"
    )
    if len(listed.kernels) != 1 or listed.kernels[0].name not in program.kernels:
        raise DumpUnreadable(
            f"the module has the kernels {[op.name for op in listed.kernels]}, and dumps are of "
            f"{list(program.kernels)}; each should be the same one"
        )
    op = listed.kernels[0]
    if op.operands[0] is None or not np.array_equal(op.operands[0], table):
        raise DumpUnreadable(f"the kernel's table was read from the module as {op.operands[0]}")
    return simulate(program.kernels[op.name], core, op.operands)


def _bytes(simulation: Simulation, table: np.ndarray) -> str | None:
    got = (simulation.bytes_hbm_read, simulation.bytes_hbm_written)
    in_smem = simulation.bytes.get("hbm_to_smem", 0)
    expected = (_BYTES + in_smem, _BYTES)
    return None if got == expected and in_smem <= 4096 else f"{got}, not {expected}"


def _copies(simulation: Simulation, table: np.ndarray) -> str | None:
    got = (simulation.copies.get("hbm_to_vmem"), simulation.copies.get("vmem_to_hbm"))
    return None if got == (_STEPS, _STEPS) else f"{got}, not {_STEPS} each"


def _loop(simulation: Simulation, table: np.ndarray) -> str | None:
    expected, runs = int(table.sum()), simulation.executions_of_regions()
    return None if expected in runs.values() else f"no region ran {expected} times, but {runs}"


def _stores(simulation: Simulation, table: np.ndarray) -> str | None:
    stores = simulation.slots_used["VSTORE"]
    expected = (_STEPS + int(table.sum())) * _ROWS * _COLUMNS // 1024
    return None if stores == expected else f"{stores}, not {expected}"


def _cycles(simulation: Simulation, table: np.ndarray) -> str | None:
    parts = simulation.bundles + simulation.cycles_waiting + simulation.cycles_mxu
    if abs(simulation.cycles - parts) > 1e-3:
        return f"{simulation.cycles}, and the parts add up to {parts}"
    least = 2 * _BYTES / simulation.core.hbm_bytes_per_cycle
    most = least + simulation.bundles + 1e4
    if not least <= simulation.cycles <= most:
        return f"{simulation.cycles:.0f}, not between {least:.0f} and {most:.0f}"
    return None


def _sources(simulation: Simulation, table: np.ndarray) -> str | None:
    lines = {
        operation.source
        for bundle in simulation.listing.bundles
        for operation in bundle.operations
        if operation.source
    }
    own = [line for line in lines if os.path.basename(line[0]) == os.path.basename(__file__)]
    return None if own else f"{len(lines)} source lines, of which none is the kernel's"


_CHECKS: dict[str, Callable[[Simulation, np.ndarray], str | None]] = {
    "bytes read and written": _bytes,
    "copies in and out": _copies,
    "turns of a loop that a table decides": _loop,
    "slots of vector stores": _stores,
    "cycles": _cycles,
    "source lines": _sources,
}
