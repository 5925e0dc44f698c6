import itertools
import operator

import pytest

from smalti.estimate.errors import Unstated
from smalti.estimate.module.hlo import read_module
from smalti.estimate.module.loops import trip_count
from smalti.estimate.module.values import Frame, Values
from tests.estimate.module.texts import counting_loop, fixture, module

COMPARE = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "NE": operator.ne, "EQ": operator.eq,
}  # fmt: skip


def count(text: str) -> int:
    read = read_module(text)
    (loop,) = [i for i in read.entry.instructions if i.opcode == "while"]
    return trip_count(Values(read), Frame(read.entry), loop)


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("scan_10", 10),
        ("scan_100", 100),
        ("scan_reversed", 10),
        ("scan_nested", 5),
        ("fori", 17),
        ("kernel_in_scan", 6),
        ("scan_10_jax_0_12", 10),
        ("kernel_in_scan_jax_0_12", 6),
    ],
)
def test_loops_of_jax(name, passes):
    assert count(fixture(name)) == passes


def test_a_loop_within_a_loop():
    read = read_module(fixture("scan_nested"))
    values = Values(read)
    (outer,) = [i for i in read.entry.instructions if i.opcode == "while"]
    body = values.enter(Frame(read.entry), outer, outer.attributes["body"].lstrip("%"))
    (inner,) = [i for i in body.computation.instructions if i.opcode == "while"]
    assert trip_count(values, body, inner) == 7


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("direction", sorted(COMPARE))
def test_every_direction_against_counting(direction, swapped):
    agreed = 0
    for start, limit, step in itertools.product((-3, 0, 4), (-5, 0, 1, 4, 9), (-2, -1, 0, 1, 3)):
        i, passes = start, 0
        while passes < 50 and COMPARE[direction](*((limit, i) if swapped else (i, limit))):
            i, passes = i + step, passes + 1
        text = counting_loop(start, limit, step, direction, swapped)
        if passes < 50:
            assert count(text) == passes, (start, limit, step)
            agreed += 1
        else:
            with pytest.raises(Unstated, match="stays true until a counter overflows"):
                count(text)
    assert agreed > 10


def test_the_compiler_s_own_count_comes_first():
    text = counting_loop(0, 8, 1, "LT").replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert count(text) == 5


def test_a_condition_within_a_fusion():
    text = counting_loop(0, 8, 2, "LT")
    test = "ROOT %test = pred[] compare(%i.2, %n.2), direction=LT"
    assert test in text
    fused = """
%fused (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}
"""
    text = text.replace(
        test, "ROOT %test = pred[] fusion(%i.2, %n.2), kind=kLoop, calls=%fused"
    ).replace("\n%body", fused + "\n%body", 1)
    assert count(text) == 4


def test_arithmetic_between_counter_and_limit():
    # 2·i − 3 < n, over i = 0, 1, …: five passes for n = 6.
    text = counting_loop(0, 6, 1, "LT").replace(
        "  ROOT %test = pred[] compare(%i.2, %n.2)",
        "  %two = s32[] constant(2)\n  %three = s32[] constant(3)\n"
        "  %double = s32[] multiply(%two, %i.2)\n  %less = s32[] subtract(%double, %three)\n"
        "  ROOT %test = pred[] compare(%less, %n.2)",
    )
    assert count(text) == 5


def test_a_step_that_the_loop_carries():
    text = counting_loop(0, 17, 1, "LT").replace("add(%i.1, %step.1)", "add(%i.1, %n.1)")
    assert count(text) == 1


def test_a_limit_that_shrinks():
    text = counting_loop(0, 9, 1, "LT").replace("tuple(%next, %n.1)", "tuple(%next, %less)")
    text = text.replace("  ROOT %t.1", "  %less = s32[] subtract(%n.1, %step.1)\n  ROOT %t.1")
    assert count(text) == 5


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("add(%i.1, %step.1)", "multiply(%i.1, %i.1)", "depends on %next, a multiply"),
        ("add(%i.1, %step.1)", "multiply(%i.1, %step.1)", "does not grow by a constant"),
        ("add(%i.1, %step.1)", "add(%i.1, %i.1)", "does not grow by a constant"),
        ("%start = s32[] constant(0)", "%start = s32[] custom-call(%x)", "starts with a value"),
        ("%limit = s32[] constant(8)", "%limit = s32[] custom-call(%x)", "depends on %limit"),
        ("pred[] compare", "pred[] and", "its condition is a and, not a comparison"),
        ("direction=LT", "direction=XX", "compares by 'XX'"),
    ],
)
def test_what_cannot_be_read_must_be_stated(before, after, why):
    text = counting_loop(0, 8, 2, "LT")
    assert before in text
    with pytest.raises(Unstated) as error:
        count(text.replace(before, after))
    assert why in str(error.value)
    assert str(error.value).startswith("how often the loop %while.1 runs is not in the program")
    assert str(error.value).endswith('State it: trip_counts={"while.1": 12}')


@pytest.mark.parametrize(("start", "limit", "step"), [(2**31 - 4, 2**31 - 1, 2)])
def test_a_counter_that_overflows(start, limit, step):
    with pytest.raises(Unstated, match="a counter of type s32 overflows"):
        count(counting_loop(start, limit, step, "LT"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fori_traced_bound", "it depends on %n.1, a parameter"),
        ("while_data", "it depends on %reduce_sum.0, a reduce"),
    ],
)
def test_loops_over_data(name, why):
    with pytest.raises(Unstated, match=why) as error:
        count(fixture(name))
    assert "(jit(f)/while)" in str(error.value)


def test_a_loop_whose_bound_changes_in_the_loop_around_it():
    inner = counting_loop(0, 8, 1, "LT")
    others = (
        inner[inner.index("%body") : inner.index("ENTRY")]
        + """
%outer_body (o: (s32[], s32[])) -> (s32[], s32[]) {
  %o.1 = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%o.1), index=0
  %m = s32[] get-tuple-element(%o.1), index=1
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %inner_state = (s32[], s32[]) tuple(%zero, %j)
  %while.2 = (s32[], s32[]) while(%inner_state), condition=%condition, body=%body
  %j.next = s32[] add(%j, %one)
  ROOT %o.2 = (s32[], s32[]) tuple(%j.next, %m)
}

"""
    )
    entry = inner[inner.index("  %x =") : inner.rindex("}")].replace(
        "body=%body", "body=%outer_body"
    )
    read = read_module(module(entry, others))
    values = Values(read)
    (outer,) = [i for i in read.entry.instructions if i.opcode == "while"]
    assert trip_count(values, Frame(read.entry), outer) == 8
    body = values.enter(Frame(read.entry), outer, "outer_body")
    with pytest.raises(Unstated, match=r"the loop %while\.2 .* on %o\.1, a parameter"):
        trip_count(values, body, body.computation.by_name["while.2"])
