import ml_dtypes
import numpy as np
import pytest

from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.module.hlo import read_module
from smalti.estimate.module.values import Frame, Values
from tests.estimate.module.texts import counting_loop, fixture, module


def constant(entry: str, name: str) -> np.ndarray | None:
    read = read_module(module("  %x = f32[8,128] parameter(0)\n" + entry))
    return Values(read).constant(Frame(read.entry), name)


def test_constants_of_every_type_that_jax_wrote():
    read = read_module(fixture("constants"))
    values = Values(read)
    frame = Frame(read.entry)
    six = np.arange(6).reshape(2, 3)
    results = [values.constant(frame, name) for name in read.entry.root.operands]
    types = (
        np.int8, np.uint32, np.float32, ml_dtypes.bfloat16, np.bool_, ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
    )  # fmt: skip
    for result, dtype in zip(results[:7], types, strict=True):
        assert result is not None
        assert result.dtype == dtype
        np.testing.assert_array_equal(result.astype(np.float32), six.astype(dtype).astype("f4"))
    assert results[7] is None  # inf · x
    assert results[8] is not None
    expected = np.array([np.nan, -np.inf, 1e-30, -0.0], np.float32)
    assert results[8].tobytes() == expected.tobytes()


def test_the_tables_of_a_splash_kernel():
    read = read_module(fixture("splash_gradient"))
    values, frame = Values(read), Frame(read.entry)
    forward = read.entry.by_name["splash_mha_fwd_residuals.1"]
    got = [values.constant(frame, name) for name in forward.operands]
    assert [None if a is None else (a.dtype.name, a.tolist()) for a in got] == [
        ("int32", 3),
        ("int8", [0, 1, 1]),
        ("int8", [0, 0, 1]),
        ("int32", [1, 1, 0]),
        ("int32", [1, 0, 1]),
        ("int8", [1, 2, 1]),
        None,
        None,
        None,
        None,
    ]
    # Behind an asynchronous copy to VMEM.
    backward = read.entry.by_name["splash_mha_dkv_no_residuals.1"]
    assert frame.computation.by_name[backward.operands[0]].opcode == "copy-done"
    table = values.constant(frame, backward.operands[0])
    assert table is not None
    assert table.tolist() == [1, 2, 0, 1]


def test_through_all_that_only_moves_a_value():
    got = constant(
        """\
  %c = s32[2,3]{1,0} constant({ { 1, 2, 3 }, { 4, 5, 6 } })
  %start = (s32[2,3]{1,0:S(1)}, s32[2,3]{1,0}, u32[]{:S(2)}) copy-start(%c)
  %done = s32[2,3]{1,0:S(1)} copy-done(%start)
  %relayout = s32[2,3]{0,1:S(1)} copy(%done)
  %pair = (f32[8,128], s32[2,3]{0,1:S(1)}) tuple(%x, %relayout)
  %barrier = (f32[8,128], s32[2,3]{0,1:S(1)}) opt-barrier(%pair)
  ROOT %got = s32[2,3]{0,1:S(1)} get-tuple-element(%barrier), index=1
""",
        "got",
    )
    assert got is not None
    assert got.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("s32[3,2]{1,0} reshape(%c)", [[1, 2], [3, 4], [5, 6]]),
        ("s32[6]{0} bitcast(%c)", [1, 2, 3, 4, 5, 6]),
        ("s32[3,2]{0,1} bitcast(%c)", [[1, 4], [2, 5], [3, 6]]),  # a transposition
        ("s32[1,2,3]{2,1,0} bitcast(%c)", [[[1, 2, 3], [4, 5, 6]]]),
        ("s8[2,3]{1,0} convert(%c)", [[1, 2, 3], [4, 5, 6]]),
        ("s32[2,2,3]{2,1,0} broadcast(%c), dimensions={0,2}", [[[1, 2, 3]] * 2, [[4, 5, 6]] * 2]),
        ("f32[6]{0} bitcast(%c)", None),
        ("s32[2,3]{1,0} negate(%c)", None),
    ],
)
def test_what_changes_a_constant_s_shape(instruction, expected):
    entry = "  %c = s32[2,3]{1,0} constant({ { 1, 2, 3 }, { 4, 5, 6 } })\n"
    got = constant(f"{entry}  ROOT %got = {instruction}\n", "got")
    if expected is None:
        assert got is None
    else:
        assert got is not None
        assert got.tolist() == expected


def test_loop_state_is_constant_only_where_the_body_hands_it_on():
    read = read_module(counting_loop(0, 8, 2, "LT"))
    values, frame = Values(read), Frame(read.entry)
    (loop,) = read.of_opcode("while")
    body = values.enter(frame, loop, "body")
    assert values.constant(body, "i.1") is None
    limit = values.constant(body, "n.1")
    assert limit is not None
    assert limit == 8
    assert values.constant(frame, "while.1", (0,)) is None
    after = values.constant(frame, "while.1", (1,))
    assert after is not None
    assert after == 8


def test_a_branch_and_a_call_see_what_they_are_given():
    others = """
%f (a: s32[]) -> s32[] {
  ROOT %a = s32[] parameter(0)
}

"""
    entry = """\
  %x = f32[8,128] parameter(0)
  %seven = s32[] constant(7)
  %called = s32[] call(%seven), to_apply=%f
  ROOT %if = s32[] conditional(%seven, %x, %called), branch_computations={%f, %f}
"""
    read = read_module(module(entry, others))
    values, frame = Values(read), Frame(read.entry)
    branch = values.enter(frame, read.entry.root, "f", branch=1)
    got = values.constant(branch, "a")
    assert got is not None
    assert got == 7
    assert values.constant(frame, "if") is None


@pytest.mark.parametrize(
    ("literal", "says"),
    [
        ("s32[4]{0} constant({...})", "left out; print the module with print_large_constants=True"),
        ("s32[4]{0} constant({1, 2, 3})", r"%c has 3 elements, its shape s32\[4\] has 4"),
        ("s8[2]{0} constant({1, 200})", "not all of type s8: out of range, from 1 to 200"),
        ("u8[2]{0} constant({1, -1})", "not all of type u8: out of range"),
        ("s32[2]{0} constant({1, 2.5})", "not all of type s32"),
        ("pred[2]{0} constant({1, 2})", "not all of type pred"),
        ("f32[2]{0} constant({1, x})", "not all of type f32"),
    ],
)
def test_damaged_constants(literal, says):
    with pytest.raises(DumpUnreadable, match=r"line 6 of the HLO text: .*" + says):
        constant(f"  ROOT %c = {literal}\n", "c")


def test_rows_with_comments_and_types_no_kernel_reads():
    rows = "  ROOT %c = s32[2,2]{1,0} constant({ /*i0=0*/ { 1, 2 }, /*i0=1*/ { 3, 4 } })\n"
    got = constant(rows, "c")
    assert got is not None
    assert got.tolist() == [[1, 2], [3, 4]]
    assert constant("  ROOT %c = c64[] constant((1, 2))\n", "c") is None
