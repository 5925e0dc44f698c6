"""What follows from the kernels' shapes, on real dumps."""

from dataclasses import replace

import numpy as np
import pytest

from smalti.chips import TENSOR_CORES
from smalti.estimate.bundles.utilization import UNITS
from smalti.estimate.program import KernelDump
from smalti.estimate.simulate import Copy, Wait, simulate

from ..fixtures import NAMES, load
from .listings import CAPACITY, dump, text, utilization


@pytest.mark.parametrize("name", NAMES)
def test_cycles_are_bundles_and_waits(name):
    found = load(name).simulate()
    assert found.cycles == pytest.approx(
        found.bundles + found.cycles_waiting + found.cycles_mxu, abs=1e-6
    )
    waits = sum(event.cycles for event in found.timeline if isinstance(event, Wait))
    assert waits == pytest.approx(found.cycles_waiting)
    copies = [event for event in found.timeline if isinstance(event, Copy)]
    assert sum(copy.bytes for copy in copies) == sum(found.bytes.values())
    assert len(copies) == sum(found.copies.values())
    assert all(copy.issued < copy.done <= found.cycles for copy in copies)
    # No unit does more than it can, and the bound is no more than all.
    assert all(0 <= share <= 1 for share in found.occupancy.values())
    assert found.occupancy[found.bound] == max(found.occupancy.values())
    assert found.bound_cycles <= found.cycles
    packed = found.bundles - int(found.executions.sum())
    assert packed >= 0
    assert packed == 0 or found.core.packs_empty_slots


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_those_of_the_bundles_executed(name):
    found = load(name).simulate()
    used = {
        unit: sum(
            int(count) * int(row[i])
            for count, row in zip(found.executions, found.utilization.used, strict=True)
        )
        for i, unit in enumerate(UNITS)
    }
    assert found.slots_used == used


@pytest.mark.parametrize(
    ("name", "k", "columns"), [("matmul_v4", 512, 256), ("matmul_v5e", 1024, 512)]
)
def test_a_matmul_fetches_and_multiplies_what_its_blocks_say(name, k, columns):
    found = load(name).simulate()
    steps = (512 // 256) * (512 // columns) * (k // 256)
    a, b = 256 * 256 * 2, 256 * columns * 2
    assert found.bytes_hbm_read == steps * (a + b)
    assert found.bytes_hbm_written == 512 * 512 * 4
    assert found.copies["hbm_to_vmem"] == 2 * steps
    products = sum(
        int(found.executions[bundle.address])
        for bundle in found.listing.bundles
        for operation in bundle.operations
        if operation.opcode.startswith("vmatmul")
    )
    assert products * 16 * 128 * 128 == 512 * 512 * k


@pytest.mark.parametrize("name", ["flash_v7x", "flash_v7x_jax_0_12"])
def test_flash_attention_runs_the_live_tiles_of_its_mask(name):
    found = load(name).simulate()
    heads, tiles = 2, 4
    live = sum(i + 1 for i in range(tiles))
    runs = set(found.executions_of_regions().values())
    # Loop (with its two rounds of pipeline), live tiles, first and last key block of a row.
    assert {heads * tiles * tiles + 2, heads * live, heads * tiles} <= runs
    assert bodies(found, "vmatmul") == heads * live
    assert found.bytes_hbm_written == heads * 512 * 128 * 2


def test_splash_attention_runs_the_live_tiles_of_its_mask():
    found = load("splash_v6e").simulate()
    tables = [value for value in load("splash_v6e").operands if value is not None]
    assert len(tables) == 2
    # 128 keys back: of each row of blocks its own and the one before.
    assert bodies(found, "vmatmul") == 2 * (1 + 2 + 2 + 2)
    # Of these, one for every tile that its table lists as live.
    assert (tables[1] > 0).sum() == 1 + 2 + 2 + 2


def bodies(found, opcode):
    (runs,) = {
        int(found.executions[bundle.address])
        for bundle in found.listing.bundles
        for operation in bundle.operations
        if operation.opcode.startswith(opcode)
    }
    return runs


@pytest.mark.parametrize("name", ["table_v6e", "table_v6e_jax_0_12", "table_v5p"])
def test_a_loop_turns_as_often_as_its_table_says(name):
    fixture = load(name)
    found = fixture.simulate()
    assert 28 in found.executions_of_regions().values()
    assert found.bytes == {
        "hbm_to_smem": 512,
        "hbm_to_vmem": 1024 * 128 * 4,
        "vmem_to_hbm": 1024 * 128 * 4,
    }
    other = np.array([1, 0, 0, 0, 0, 0, 0, 2], np.int32)
    fewer = replace(fixture, operands=(other, None)).simulate()
    assert max(found.executions - fewer.executions) == 28 - 3


def test_a_kernel_of_v7x_that_copies_its_input_itself():
    found = load("double_buffer_v7x").simulate()
    assert found.bytes == {"vmem_to_smem": 512, "vmem_to_hbm": 1024 * 128 * 4}
    assert found.copies["vmem_to_hbm"] == 8


def test_occupancy_is_slots_over_those_there_were():
    bundles = ["%v1_v1 = vadd.f32 %v0_v0, %v0_v0", "", "", ""]
    rows = [[0] * len(UNITS) for _ in bundles]
    rows[0][UNITS.index("VALU")] = 3
    rows[1][UNITS.index("VSTORE:SPILL")] = 1
    found = simulate(KernelDump("k", text(bundles), utilization(rows)), TENSOR_CORES["v6e"], ())
    assert found.occupancy["VALU"] == 3 / (4 * CAPACITY[UNITS.index("VALU")])
    assert found.occupancy["VSTORE:SPILL"] == 1 / (4 * CAPACITY[UNITS.index("VSTORE:SPILL")])
    assert (found.bound, found.bound_cycles) == ("VALU", pytest.approx(3 / 4))
    assert simulate(dump(bundles), TENSOR_CORES["v6e"], ()).occupancy["VALU"] == 0
