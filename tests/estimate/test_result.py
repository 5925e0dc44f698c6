"""A program's time from its parts; the parts have tests of their own."""

import re
from dataclasses import replace

import numpy as np
import pytest

from smalti.chips import TENSOR_CORES
from smalti.estimate import EstimateError, KernelDump, Memory, Program, UnknownOperation, estimate

from .fixtures import load
from .simulate.listings import dump

PARAMETER = "parameter(1)"
TABLE = "constant({3, 0, 7, 1, 2, 5, 4, 6})"


def program(kernels=None, table=TABLE, chip="v6e", calls=1, xla_cycles=1000) -> Program:
    """A fusion of `xla_cycles`, then `calls` calls of the kernel of table_v6e, named alike."""
    lines, last = [], "fused"
    for i in range(calls):
        lines.append(
            f"  %function.{i} = f32[1024,128]{{1,0}} custom-call(%table, %{last}), "
            'custom_call_target="tpu_custom_call", operand_layout_constraints={}'
        )
        last = f"function.{i}"
    lines[-1:] = [lines[-1].replace("  %", "  ROOT %", 1)]
    hlo = (
        "HloModule hand, is_scheduled=true, entry_computation_layout={()->()}\n\n"
        "%fused_computation (p: f32[1024,128]) -> f32[1024,128] {\n"
        "  %p = f32[1024,128]{1,0} parameter(0)\n"
        "  ROOT %n = f32[1024,128]{1,0} negate(%p)\n}\n\n"
        f"ENTRY %main (x: f32[1024,128]{', t: s32[8]' if table == PARAMETER else ''})"
        " -> f32[1024,128] {\n"
        "  %x = f32[1024,128]{1,0} parameter(0)\n"
        f"  %table = s32[8]{{0}} {table}\n"
        "  %fused = f32[1024,128]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation, "
        f'backend_config={{"window_config":{{"estimated_cycles":"{xla_cycles}"}}}}\n'
        + "\n".join(lines)
        + "\n}\n"
    )
    if kernels is None:
        one = load("table_v6e").dump
        kernels = {f"function.{i}": replace(one, op=f"function.{i}") for i in range(calls)}
    return Program("f", chip, "v6e:2x2", 1, (), {}, hlo, Memory(0, 0, 0, 0, 0), kernels)


def test_a_program_takes_its_operations_and_its_simulated_kernels():
    kernel = load("table_v6e").simulate()
    found = estimate(program())
    assert found.cycles == pytest.approx(1000 + kernel.cycles)
    assert found.kernel_cycles == pytest.approx(kernel.cycles)
    assert found.time_ns == pytest.approx(found.cycles / 1.75)
    assert set(found.simulations) == {"function.0"}
    whole = 1024 * 128 * 4
    assert found.bytes_hbm == 2 * whole + kernel.bytes_hbm_read + kernel.bytes_hbm_written
    core = TENSOR_CORES["v6e"]
    share = found.bytes_hbm / core.hbm_bytes_per_cycle / found.cycles
    assert found.occupancy["HBM"] == pytest.approx(share)
    assert found.bound == "HBM"


def test_kernels_alike_are_simulated_once_and_count_as_often_as_they_run():
    found = estimate(program(calls=3))
    first = found.simulations["function.0"]
    assert [found.simulations[f"function.{i}"] for i in range(3)] == [first] * 3
    assert found.cycles == pytest.approx(1000 + 3 * first.cycles)
    occupancy = first.occupancy["VSTORE"]
    assert found.occupancy["VSTORE"] == pytest.approx(occupancy)


def test_an_operand_that_the_program_computes_is_stated():
    parameter = program(table=PARAMETER)
    with pytest.raises(EstimateError, match="operand 0, whose value is not stated"):
        estimate(parameter)
    given = np.array([1, 0, 0, 0, 0, 0, 0, 0], np.int32)
    found = estimate(parameter, operands={"function.0": {0: given}})
    assert found.simulations["function.0"].cycles < load("table_v6e").simulate().cycles


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"operands": {"other": {}}},
            "operands: the program has no kernel 'other'; it has 'function.0'",
        ),
        (
            {"kernel_branches": {"other": {}}},
            "kernel_branches: the program has no kernel 'other'; it has 'function.0'",
        ),
        (
            {"operands": {"function.0": {7: np.zeros(1)}}},
            "operands['function.0'][7]: it has operands 0 to 1",
        ),
    ],
)
def test_what_the_program_does_not_have(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        estimate(program(), **options)


def test_a_kernel_without_a_dump():
    with pytest.raises(
        EstimateError, match=r"^the program holds no dump of its kernel function\.0$"
    ):
        estimate(program(kernels={}))


def test_a_kernel_that_cannot_be_simulated_leaves_no_number():
    unknown = {"function.0": replace(dump(["%1 = sfrob %s1_s1"]), op="function.0")}
    with pytest.raises(UnknownOperation, match=r"^function\.0: bundle 0x0 holds the operation"):
        estimate(program(kernels=unknown))


def test_operations_of_xla_whose_bundles_are_there_are_simulated():
    simulated = dump(["", "", ""])
    with_bundles = replace(program(), xla_ops={"fused": KernelDump("fused", *_texts(simulated))})
    found = estimate(with_bundles)
    assert found.cycles == pytest.approx(3 + found.kernel_cycles)
    unknown = dump(["%1 = sfrob %s1_s1"])
    without = replace(program(), xla_ops={"fused": KernelDump("fused", *_texts(unknown))})
    assert estimate(without).cycles == pytest.approx(1000 + found.kernel_cycles)


def test_operations_of_xla_that_are_alike_share_a_simulation():
    """As those of a model's layers, of which the compiler writes one out."""
    one = program()
    line = next(line for line in one.hlo.splitlines() if "%fused = " in line)
    another = line.replace("%fused =", "%fused.1 =")
    other = another.replace("%fused.1", "%other").replace('"1000"', '"999"')
    hlo = one.hlo.replace(line, f"{line}\n{another}\n{other}")
    bundles = {"fused": KernelDump("fused", *_texts(dump(["", "", ""])))}
    found = estimate(replace(one, hlo=hlo, xla_ops=bundles))
    assert found.cycles == pytest.approx(3 + 3 + 999 + found.kernel_cycles)
    by = {op.name: (op.priced_by, op.compiler_cycles) for op in found.schedule.ops}
    assert by["fused.1"] == ("simulation", 1000)
    assert by["other"] == ("compiler", None)


def _texts(kernel: KernelDump):
    return kernel.bundles, kernel.utilization


def test_other_constants_than_the_chips():
    core = TENSOR_CORES["v6e"]
    slow = estimate(program(), core=replace(core, hbm_bytes_per_s=core.hbm_bytes_per_s / 2))
    assert slow.cycles > estimate(program()).cycles
