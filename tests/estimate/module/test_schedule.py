import numpy as np
import pytest

from smalti.estimate.errors import Unstated
from smalti.estimate.module import read_module, schedule
from tests.estimate.module.texts import counting_loop, fixture, module

SIZE = 8 * 128 * 4


def listed(text: str, **stated):
    return schedule(read_module(text), bytes_per_cycle=64.0, overlap="full", **stated)


def working(text: str, **stated) -> list[tuple[str, int, tuple[str, ...]]]:
    """Name, count and path of all that takes time or has no price."""
    ops = listed(text, **stated).ops
    return [(op.name, op.count, op.path) for op in ops if op.cycles != 0]


def test_a_scan_runs_its_body_as_often_as_it_is_long():
    for length in (10, 100):
        loop = ("while.2",)
        assert working(fixture(f"scan_{length}")) == [
            ("copy.15", length, loop),
            ("fusion.8", length, loop),
            ("dynamic_update_slice.6", length, loop),
        ]


def test_loops_within_loops_multiply():
    found = working(fixture("scan_nested"))
    inner = [(name, count) for name, count, path in found if path == ("while.10", "while.11")]
    outer = [(name, count) for name, count, path in found if path == ("while.10",)]
    assert inner
    assert outer
    assert {count for _, count in inner} == {35}
    assert {count for _, count in outer} == {5}


def test_the_schedule_is_in_order_and_says_where_from():
    ops = {op.name: op for op in listed(fixture("scan_10")).ops}
    names = list(ops)
    assert names.index("copy-start.2") < names.index("fusion.8") < names.index("copy-done.3")
    fusion = ops["fusion.8"]
    assert (fusion.kind, fusion.priced_by, fusion.cycles) == ("xla", "compiler", 1536.0)
    assert fusion.op_name == "jit(f)/while/body/closed_call/dot_general"
    assert fusion.source == ("/src/program.py", 18)
    assert (fusion.bytes_hbm_read, fusion.bytes_hbm_written) == (0, 512)  # a scalar in its tile


def test_the_condition_runs_once_more_than_the_body():
    ops = {op.name: op.count for op in listed(counting_loop(0, 8, 2, "LT")).ops}
    assert (ops["test"], ops["next"]) == (5, 4)
    ops = {op.name: op.count for op in listed(counting_loop(8, 8, 2, "LT")).ops}
    assert ops["test"] == 1
    assert "next" not in ops


def test_a_loop_over_data_runs_as_often_as_stated():
    text = fixture("while_data")
    with pytest.raises(Unstated, match=r'trip_counts=\{"while.4": 12\}'):
        listed(text)
    found = listed(text, trip_counts={"while.4": 12})
    assert found.trip_counts == {"while.4": 12}
    assert found.stated == ("%while.4 runs 12 times",)
    assert {op.name: op.count for op in found.ops}["convert_reduce_fusion"] == 13


def test_stated_counts_are_checked():
    text = fixture("scan_10")
    assert listed(text, trip_counts={"while.2": 10}).trip_counts == {"while.2": 10}
    with pytest.raises(ValueError, match=r"trip_counts\['while.2'\] is 11, but .* 10 times"):
        listed(text, trip_counts={"while.2": 11})
    with pytest.raises(ValueError, match=r"no loop .* called 'while.3'; did you mean 'while.2'\?"):
        listed(text, trip_counts={"while.3": 10})
    with pytest.raises(ValueError, match=r"called 'x'; there are 'while.2'"):
        listed(text, trip_counts={"x": 10})
    with pytest.raises(ValueError, match=r"called 'x'; it has no loop at all"):
        listed(fixture("dot"), trip_counts={"x": 10})
    for bad in (-1, 2.5):
        with pytest.raises(ValueError, match=r"trip_counts\['while.2'\] is .* from 0 on"):
            listed(text, trip_counts={"while.2": bad})


def test_a_conditional_takes_the_stated_branch():
    text = fixture("cond")
    with pytest.raises(Unstated) as error:
        listed(text)
    assert str(error.value) == (
        "which of its 2 branches the conditional %cond.3.clone (jit(f)/cond) takes is not in the "
        'program. State it: branches={"cond.3.clone": 0}'
    )
    name = "cond.3.clone"
    doubled = listed(text, branches={name: 0})
    assert doubled.stated == ("%cond.3.clone takes branch 0",)
    assert working(text, branches={name: 0}) == [
        ("broadcast_multiply_fusion", 1, ("cond.3.clone[0]",))
    ]
    assert working(text, branches={name: 1}) == [
        ("convolution_tanh_fusion", 1, ("cond.3.clone[1]",))
    ]
    with pytest.raises(ValueError, match=r"is 2; %cond.3.clone has branches 0 to 1"):
        listed(text, branches={name: 2})
    with pytest.raises(ValueError, match=r"did you mean 'cond\.3\.clone'"):
        listed(text, branches={"cond.3": 0})


def test_of_a_boolean_conditional_branch_1_is_true():
    others = """
%yes (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  ROOT %y = f32[8,128]{1,0:S(1)} copy(%a)
}

%no (b: f32[8,128]) -> f32[8,128] {
  ROOT %b = f32[8,128]{1,0} parameter(0)
}

"""
    entry = """\
  %x = f32[8,128]{1,0} parameter(0)
  %p = pred[] constant(true)
  ROOT %if = f32[8,128] conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
"""
    text = module(entry, others)
    assert working(text, branches={"if": 1}) == [("y", 1, ("if[1]",))]
    assert working(text, branches={"if": 0}) == []


def test_calls_and_asynchronous_calls_are_entered():
    others = """
%f (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  ROOT %y = f32[8,128]{1,0:S(1)} copy(%a)
}

"""
    entry = """\
  %x = f32[8,128]{1,0} parameter(0)
  %called = f32[8,128]{1,0:S(1)} call(%x), to_apply=%f
  %start = ((f32[8,128]{1,0}), f32[8,128]{1,0:S(1)}) async-start(%x), calls=%f
  ROOT %done = f32[8,128]{1,0:S(1)} async-done(%start)
"""
    assert working(module(entry, others)) == [("y", 1, ("called",)), ("y", 1, ("start",))]


def test_a_kernel_in_a_loop():
    found = listed(fixture("kernel_in_scan"))
    (kernel,) = found.kernels
    assert (kernel.name, kernel.count, kernel.path) == ("closed_call.4", 6, ("while",))
    assert (kernel.cycles, kernel.bytes_hbm_read, kernel.priced_by) == (None, None, "simulation")
    assert kernel.operands == (None,)
    (filled,) = found.with_kernel("closed_call.4", 1000.0, 7, 8).kernels
    assert (filled.cycles, filled.bytes_hbm_read, filled.bytes_hbm_written) == (1000.0, 7, 8)
    with pytest.raises(
        ValueError, match=r"no kernel .* 'closed_call'; did you mean 'closed_call\.4"
    ):
        found.with_kernel("closed_call", 1000.0, 7, 8)


def test_a_kernel_s_table_comes_with_it():
    (kernel,) = listed(fixture("kernel_prefetch")).kernels
    table, x = kernel.operands
    assert x is None
    assert table is not None
    np.testing.assert_array_equal(table, np.array([3, 1, 2, 0], np.int32), strict=True)


def test_a_table_that_a_loop_carries_unchanged():
    text = counting_loop(0, 8, 2, "LT")
    kernel = '  %k = s32[] custom-call(%n.1, %i.1), custom_call_target="tpu_custom_call"\n'
    (op,) = listed(text.replace("  ROOT %t.1", kernel + "  ROOT %t.1")).kernels
    limit, counter = op.operands
    assert counter is None
    assert limit == 8
    assert op.count == 4


def test_what_overlaps_is_an_assumption():
    read = read_module(fixture("scan_10"))
    cycles = {}
    for overlap in ("none", "full"):
        ops = schedule(read, bytes_per_cycle=1024.0, overlap=overlap).ops
        cycles[overlap] = {op.name: op.cycles for op in ops if op.opcode == "copy-start"}
    assert set(cycles["full"].values()) == {0.0}
    assert cycles["none"]["copy-start.2"] == 512 * 512 * 2 / 1024
    assert cycles["none"].keys() == cycles["full"].keys()


def test_arguments_are_checked():
    read = read_module(fixture("dot"))
    with pytest.raises(ValueError, match="overlap is 'some'; allowed are 'none' and 'full'"):
        schedule(read, bytes_per_cycle=64.0, overlap="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bytes_per_cycle is 0; it must be above 0"):
        schedule(read, bytes_per_cycle=0, overlap="none")


def test_a_call_on_another_core():
    ops = {op.name: op for op in listed(fixture("sparsecore_gather_jax_0_12")).ops}
    gather = ops["gather_offload_custom_fusion.3"]
    assert gather.thread == "sparsecore"
    assert gather.path[0] == "gather_offload_async_start"
    assert (gather.priced_by, gather.cycles) == ("nobody", None)
    assert {op.thread for op in ops.values() if op.priced_by == "compiler"} == {""}


def test_cycles_of_another_core_do_not_count():
    text = fixture("sparsecore_gather_jax_0_12")
    most = '"estimated_cycles":"9223372036854775807"'
    assert most in text
    ops = {op.name: op for op in listed(text.replace(most, '"estimated_cycles":"500"')).ops}
    assert ops["gather_offload_custom_fusion.3"].cycles is None
