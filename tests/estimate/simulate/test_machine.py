"""The time model: copies, waits, flags, SMEM."""

import re

import numpy as np
import pytest

from smalti.chips import TENSOR_CORES
from smalti.estimate.errors import SimulationFailed, Unstated
from smalti.estimate.simulate import Copy, Wait
from smalti.estimate.simulate import kernel as kernel_module

from .listings import HBM, HBM_TABLE, SCALAR, run

CORE = TENSOR_CORES["v6e"]
FLAG = "[#allocation1]"
COPY = f"%1 = dma.hbm_to_vmem %s0_s0, 1000, 0, {FLAG}"
WAIT = f"%2 = dma.done.wait {FLAG}, 1000"
TAKE = f"%3 = vsyncadd {FLAG}, {2**32 - 1000}"
TRANSFER = 1000 * 32 / CORE.hbm_bytes_per_cycle


def test_a_wait_that_comes_too_early_takes_until_the_copy_has_arrived():
    simulation = run([HBM, COPY, "", WAIT, TAKE])
    arrival = 1 + TRANSFER + CORE.dma_latency_cycles
    assert simulation.cycles == pytest.approx(arrival + 2)
    assert simulation.cycles_waiting == pytest.approx(arrival - 3)
    assert simulation.timeline == (
        Copy(1, "hbm_to_vmem", 32000, 1.0, pytest.approx(arrival)),  # type: ignore[arg-type]
        Wait(3, 3.0, pytest.approx(arrival - 3)),  # type: ignore[arg-type]
    )
    assert simulation.bytes == {"hbm_to_vmem": 32000}
    assert (simulation.bytes_hbm_read, simulation.bytes_hbm_written) == (32000, 0)
    assert simulation.time_ns == pytest.approx((arrival + 2) / 1.75)


def test_a_wait_that_comes_late_takes_its_bundle_only():
    simulation = run([HBM, COPY, *[""] * 2000, WAIT, TAKE])
    assert simulation.cycles == 2004
    assert simulation.cycles_waiting == 0
    assert [type(event) for event in simulation.timeline] == [Copy]


def test_copies_share_one_pipe_and_their_latencies_overlap():
    write = COPY.replace("hbm_to_vmem", "vmem_to_hbm").replace("allocation1", "allocation2")
    bundles = [HBM, COPY, write, WAIT, TAKE, WAIT.replace("1]", "2]"), TAKE.replace("1]", "2]")]
    simulation = run(bundles)
    arrival = 1 + 2 * TRANSFER + CORE.dma_latency_cycles
    assert simulation.cycles == pytest.approx(arrival + 2)
    assert simulation.bytes == {"hbm_to_vmem": 32000, "vmem_to_hbm": 32000}
    assert simulation.copies == {"hbm_to_vmem": 1, "vmem_to_hbm": 1}
    # The second starts when the pipe is free.
    first, _, second, _ = sorted(simulation.timeline, key=lambda event: type(event).__name__)[:4]
    assert simulation.timeline[1].done - simulation.timeline[0].done == pytest.approx(TRANSFER)
    assert {type(first), type(second)} == {Copy, Wait}


def test_copies_inside_of_the_core_leave_the_pipe_alone():
    local = COPY.replace("hbm_to_vmem", "vmem_to_vmem")
    simulation = run(
        [
            HBM,
            local,
            COPY.replace("1]", "2]"),
            WAIT,
            TAKE,
            WAIT.replace("1]", "2]"),
            TAKE.replace("1]", "2]"),
        ]
    )
    assert simulation.cycles == pytest.approx(2 + TRANSFER + CORE.dma_latency_cycles + 2)
    assert simulation.bytes_hbm_read == 32000


def test_a_general_copy_goes_where_its_pointers_point():
    simulation = run(
        [
            HBM,
            "%s5_s5 = int_to_ptr.hbm [resolvable:$true] %s4_s5",
            "%s7_s6 = int_to_ptr.vmem [resolvable:$true] %s6_s6",
            f"%1 = dma.general %s5_s5, 1000, %s7_s6, {FLAG}",
            WAIT,
            TAKE,
        ]
    )
    assert simulation.bytes == {"hbm_to_vmem": 32000}


def test_a_flag_counts_and_two_copies_on_one_are_waited_for_together():
    both = [HBM, COPY, COPY, WAIT, TAKE, WAIT, TAKE]
    assert run(both).cycles == pytest.approx(1 + 2 * TRANSFER + CORE.dma_latency_cycles + 2)
    at_once = [HBM, COPY, COPY, WAIT.replace("1000", "2000"), TAKE.replace("296", "6296")]
    at_once[-1] = f"%3 = vsyncadd {FLAG}, {2**32 - 2000}"
    assert run(at_once).cycles == pytest.approx(1 + 2 * TRANSFER + CORE.dma_latency_cycles + 2)


@pytest.mark.parametrize("wait", ["vwait.ge", "vwait.ge.trace"])
def test_semaphores(wait):
    signal, take = f"%1 = vsyncadd {FLAG}, 2", f"%2 = vsyncadd {FLAG}, {2**32 - 2}"
    check = [
        f"%4 = vsyncmov {FLAG}",
        "%s9_s9 = vpop.sfrf %4",
        "%p9_p9 = scmp.ne.s32.totalorder %s9_s9, 0",
        "%5 = shalt.err (%p9_p9)",
    ]
    assert run([signal, take, f"%3 = {wait} {FLAG}, 0", *check]).cycles == 7
    with pytest.raises(SimulationFailed, match="0 granules on a flag that holds -2 with no copy"):
        run([take, f"%3 = {wait} {FLAG}, 0"])
    with pytest.raises(SimulationFailed, match="the kernel halts at bundle 0x4"):
        run([signal, *check])


def test_a_flag_read_holds_the_copies_that_have_arrived():
    read = [
        f"%4 = vsyncmov {FLAG}",
        "%s9_s9 = vpop.sfrf %4",
        "%p9_p9 = scmp.ne.s32.totalorder %s9_s9, 0",
        "%5 = shalt.err (%p9_p9)",
    ]
    assert run([HBM, COPY, *read, WAIT, TAKE]).copies == {"hbm_to_vmem": 1}
    with pytest.raises(SimulationFailed, match="halts"):
        run([HBM, COPY, *[""] * 2000, *read, WAIT, TAKE])


def test_a_wait_without_a_copy_never_ends():
    expected = (
        "k.1, block at bundle 0x0: the wait at bundle 0x1 is for 1000 granules on a flag that "
        "holds 0 with no copy under way: it never ends"
    )
    with pytest.raises(SimulationFailed, match=f"^{re.escape(expected)}$"):
        run([HBM, WAIT])
    with pytest.raises(SimulationFailed, match="holds 1000 with no copy under way"):
        run([HBM, COPY, WAIT.replace("1000", "1001")])
    # What was waited for and taken off is gone.
    with pytest.raises(SimulationFailed, match="holds 0 with no copy under way"):
        run([HBM, COPY, WAIT, TAKE, WAIT])


def test_a_kernel_that_leaves_copies_under_way():
    with pytest.raises(SimulationFailed, match="32000 bytes of copies that nothing waits for"):
        run([HBM, COPY, *[""] * 5000])
    reset = f"%3 = vsyncpa {FLAG}, 0"
    with pytest.raises(SimulationFailed, match="reset while 32000 bytes that were copied on it"):
        run([HBM, COPY, reset])
    assert run([reset, ""]).cycles == 2


def test_a_set_flag_holds_its_value():
    assert run([f"%1 = vsyncpa {FLAG}, 5", f"%2 = dma.done.wait {FLAG}, 5"]).cycles == 2


def copied(table, source="%s1_s1", granules=16):
    """Runs as many products as word 3 of the table says."""
    return run(
        [
            f"{HBM_TABLE}  ;;  {SCALAR}",
            f"%1 = dma.hbm_to_smem {source}, {granules}, [#allocation2], {FLAG}",
            f"%2 = dma.done.wait {FLAG}, {granules}",
            "%s9_s9 = sld [smem:[#allocation2 + $0x3]]",
            "%s9_s9 = ssub.s32 %s8_s9, 1 // Start region 1",
            "%p9_p9 = scmp.gt.s32.totalorder %s9_s9, 0",
            "%5 = sbr.rel (%p9_p9) target = $region1",
            *[""] * 3,
            " // End region 1",
        ],
        [None, table, np.int32(3)],
    )


def test_an_operand_reaches_smem():
    table = np.array([9, 9, 9, 4, 9, 9, 9, 9], np.int32)
    simulation = copied(table)
    assert simulation.executions_of_regions() == {1: 4}
    assert simulation.bytes == {"hbm_to_smem": 512}
    assert simulation.cycles == simulation.bundles + simulation.cycles_waiting


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("%s1_s1", "a word copied into SMEM from operand 1, whose value is not stated"),
        ("%s7_s7", "a word copied into SMEM from an operand whose value is not stated"),
    ],
)
def test_words_that_are_not_stated(source, why):
    with pytest.raises(Unstated, match=f"the control flow depends on {why}"):
        copied(None, source)


def test_a_slice_of_an_operand_is_never_taken_for_another():
    table = np.arange(8, dtype=np.int32)
    for offset in (1, 16, 32, 1 << 10, 1 << 11, (1 << 10) - 1):
        with pytest.raises(Unstated, match="an operand whose value is not stated"):
            copied_slice(table, "%s0_s0", offset)
    with pytest.raises(Unstated, match="from behind the values of an operand"):
        copied_slice(table, "%s1_s1", 16)


# A row of the table stands in 128 words of its own.
@pytest.mark.parametrize(
    ("chip", "granules", "apart"), [("v4", 1, 1), ("v5e", 16, 1), ("v6e", 16, 16)]
)
@pytest.mark.parametrize("pointer", [False, True])
def test_a_slice_of_an_operand_reaches_smem(chip, granules, apart, pointer):
    table = np.zeros((3, 1, 8), np.int32)
    table[2, 0, 0] = 1
    for row in range(3):
        waits = copied_slice(table, "%s1_s1", row * apart, chip, granules, pointer)
        assert waits == (row == 2)


def copied_slice(table, operand, offset, chip="v6e", granules=16, pointer=False):
    """Whether the first word that is copied is above 0."""
    text = HBM_TABLE.replace("s32[8]", f"s32[{','.join(map(str, table.shape))}]")
    simulation = run(
        [
            f"{HBM}  ;;  {text}",
            f"%s9_s9 = scalar_lea.hbm {operand}, {offset}",
            "%s9_s9 = sshll.u32 %s9_s9, 4" if pointer else "",
            f"%1 = dma.hbm_to_smem %s9_s9, {granules}, [#allocation2], {FLAG}",
            f"%2 = dma.done.wait {FLAG}, {granules}",
            "%s9_s9 = sld [smem:[#allocation2]]",
            "%p9_p9 = scmp.gt.s32.totalorder %s9_s9, 0",
            "%3 = dma.hbm_to_vmem (%p9_p9), %s0_s0, 1, 0, [#allocation3]",
            "%4 = dma.done.wait (%p9_p9), [#allocation3], 1",
        ],
        [None, table],
        chip,
    )
    return simulation.copies.get("hbm_to_vmem", 0)


def test_a_copy_larger_than_any_smem():
    with pytest.raises(SimulationFailed, match="a copy of 64000000 bytes into SMEM, which holds"):
        copied(None, granules=2_000_000)


def test_a_scalar_operand_stands_in_its_register():
    bundles = [
        SCALAR,
        "%p1_p1 = scmp.eq.s32.totalorder %s2_s2, 4294967293",
        "%1 = shalt.err (!%p1_p1)",
    ]
    assert run(bundles, [None, None, np.int32(-3)]).cycles == 3
    with pytest.raises(SimulationFailed, match="halts"):
        run(bundles, [None, None, np.int32(3)])
    wait = [SCALAR, f"%1 = dma.done.wait {FLAG}, %s2_s2"]
    with pytest.raises(Unstated, match="operand 2, a scalar whose value is not stated"):
        run(wait, [None] * 3)


@pytest.mark.parametrize(
    ("operand", "got"),
    [
        (np.zeros(9, np.int32), "int32[9]"),
        (np.zeros((2, 4), np.int32), "int32[2, 4]"),
        (np.zeros(8, np.int8), "int8[8]"),
    ],
)
def test_an_operand_of_another_shape_or_size(operand, got):
    expected = f"operands[1] of k.1 is {got}; the kernel was compiled for s32[8]"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        run([HBM_TABLE, ""], [None, operand])


def test_a_loop_that_never_ends(monkeypatch):
    monkeypatch.setattr(kernel_module, "BLOCKS_WITHOUT_COPY", 1000)
    endless = [
        "",
        "%1 = sbr.rel target = $region1 // Start region 1",
        *[""] * 3,
        " // End region 1",
    ]
    with pytest.raises(SimulationFailed, match="no end after 1000 blocks; a loop of the kernel"):
        run([*endless, ""])
    copying = [
        HBM,
        "%1 = sbr.rel target = $region1 // Start region 1",
        COPY,
        WAIT,
        TAKE,
        " // End region 1",
        "",
    ]
    monkeypatch.setattr(kernel_module, "BLOCKS", 5000)
    with pytest.raises(SimulationFailed, match="no end after 5000 blocks; a loop of the kernel"):
        run(copying)


def test_of_cores_that_share_a_kernel_the_slower_one_counts():
    bundles = [
        "%s1_s1 = sld [smem:[#allocation0]] /* core id */ ;; %s2_s2 = inlined_call_operand.hbm "
        "[shape: f32[8,128], index: 0, kind: input, shape index: {}]",
        "%p1_p1 = scmp.ne.s32.totalorder %s1_s1, 0",
        "%1 = dma.hbm_to_vmem (%p1_p1), %s2_s2, 128, [#allocation3], [#allocation2]",
        "%2 = dma.done.wait (%p1_p1), [#allocation2], 128",
        "%3 = vsyncadd (%p1_p1), [#allocation2], 4294967168",
        "",
    ]
    core = TENSOR_CORES["v5p"]
    both = run(bundles, [None], "v5p")
    assert both.cores == 2
    assert both.bytes == {"hbm_to_vmem": 4096}
    copying = 4096 / core.hbm_bytes_per_cycle + core.dma_latency_cycles
    assert both.cycles == pytest.approx(len(bundles) + copying - 1)
    alone = run(bundles, [None], "v6e")
    assert (alone.cores, alone.cycles, alone.bytes) == (1, len(bundles), {})


def test_a_copy_within_hbm_goes_through_its_pipe_twice():
    bundles = [
        "%s2_s2 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input, shape "
        "index: {}] ;; %s3_s3 = inlined_call_operand.hbm [shape: f32[8,128], index: 1, kind: "
        "output, shape index: {}]",
        "%1 = dma.general %s2_s2, 1024000, %s3_s3, [#allocation2], [#allocation4], [#allocation5], "
        "0, 0",
        "%2 = dma.done.wait [#allocation2], 1024000",
        "%3 = vsyncadd [#allocation2], 4293943296",
        "",
    ]
    found = run(bundles, [None])
    size = 1024000 * 32
    assert (found.bytes_hbm_read, found.bytes_hbm_written) == (size, size)
    assert found.cycles > 2 * size / TENSOR_CORES["v6e"].hbm_bytes_per_cycle
    assert found.occupancy["HBM"] <= 1
