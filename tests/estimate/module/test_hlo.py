import re

import pytest

from smalti.estimate.errors import DumpUnreadable
from smalti.estimate.module.hlo import read_module
from tests.estimate.module.texts import FIXTURES, fixture, module

NAMES = sorted(path.name.partition(".")[0] for path in FIXTURES.glob("*.txt*"))
SHORT = [name for name in NAMES if (FIXTURES / f"{name}.txt").exists()]

ENTRY = """\
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %twice = f32[8,128]{1,0:T(8,128)} add(%x, %x), metadata={op_name="f/\\"a, {b" stack_frame_id=2}
  ROOT %t = (f32[8,128]{1,0:T(8,128)}, /*index=1*/f32[8,128]{1,0:T(8,128)}) tuple(%x, /*index=1*/%twice)
"""  # noqa: E501


@pytest.mark.parametrize("name", NAMES)
def test_real_modules_are_read_whole(name):
    text = fixture(name)
    read = read_module(text)
    instructions = sum(len(c.instructions) for c in read.computations.values())
    assert instructions == len(re.findall(r"^  (?:ROOT )?%\S+ = ", text, re.MULTILINE))
    cycles = [i.cycles for c in read.computations.values() for i in c.instructions if i.cycles]
    printed = [int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', text)]
    # The largest number stands for "no estimate"; libtpu 0.0.50 writes it for the SparseCore.
    assert cycles == [number for number in printed if number != 2**63 - 1]


def test_an_instruction():
    read = read_module(module(ENTRY))
    twice = read.entry.by_name["twice"]
    assert (twice.opcode, twice.operands, twice.shape.dims) == ("add", ("x", "x"), (8, 128))
    assert twice.op_name == 'f/"a, {b'
    assert (twice.cycles, twice.line) == (None, 6)
    assert read.entry.root.operands == ("x", "twice")
    assert read.entry.parameters[0].name == "x"


def test_operands_may_carry_their_shapes():
    text = module(ENTRY.replace("add(%x, %x)", "add(f32[8,128]{1,0} %x, f32[8,128]{1,0} %x)"))
    assert read_module(text).entry.by_name["twice"].operands == ("x", "x")


def test_the_calls_of_loops_branches_and_fusions():
    read = read_module(fixture("cond"))
    (conditional,) = read.of_opcode("conditional")
    assert conditional.called == ("region_0.1", "region_1.2")
    (loop,) = read_module(fixture("scan_10")).of_opcode("while")
    assert loop.calls("body") == "wide.wide.region_0.4.sunk.clone.sunk"
    assert loop.calls("to_apply") is None


def test_sources_come_from_the_tables_of_stack_frames():
    read = read_module(fixture("scan_10"))
    (loop,) = read.of_opcode("while")
    assert read.source(loop) == ("/src/program.py", 19)
    assert read.source(read.entry.root) is None


def test_sources_may_stand_at_the_instruction():
    old = 'metadata={op_name="f" source_file="a.py" source_line=7}'
    text = module(re.sub(r"metadata=\{.*\}", old, ENTRY))
    read = read_module(text)
    assert read.source(read.entry.by_name["twice"]) == ("a.py", 7)


def test_kernel_metadata_may_break_lines():
    read = read_module(fixture("splash_gradient"))
    forward = read.entry.by_name["splash_mha_fwd_residuals.1"]
    assert "xprof_metadata" in forward.attributes["frontend_attributes"]
    assert forward.target == "tpu_custom_call"
    assert len(forward.operands) == 10


@pytest.mark.parametrize("name", SHORT)
def test_no_cut_goes_unnoticed(name):
    text = fixture(name).rstrip("\n")
    lines = text.split("\n")
    for kept in range(1, len(lines)):
        with pytest.raises(DumpUnreadable, match=r"line \d+ of the HLO text"):
            read_module("\n".join(lines[:kept]))
    # And within lines, the last of which is a bracket.
    for kept in range(0, len(text), max(1, len(text) // 50)):
        with pytest.raises(DumpUnreadable, match=r"line \d+ of the HLO text"):
            read_module(text[:kept])


def test_a_lost_line_is_noticed():
    lines = fixture("scan_nested").split("\n")
    lost = [n for n, line in enumerate(lines) if line.startswith("  ") or line == "}"]
    unnoticed = []
    for n in lost:
        try:
            read_module("\n".join(lines[:n] + lines[n + 1 :]))
        except DumpUnreadable:
            continue
        unnoticed.append(lines[n])
    # Only what nobody uses can go: here nothing.
    assert unnoticed == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("HloModule hand", "HloMod hand", "line 1 .*begins with 'HloModule'"),
        ("is_scheduled=true", "is_scheduled=false", "line 1 .*not scheduled"),
        ("add(%x, %x)", "add(%x, %y)", "line 6 .*%twice uses %y, which does not stand above"),
        ("add(%x, %x)", "add(%x, )", "line 6 .*%twice: an operand is missing"),
        ("add(%x, %x)", "add(%x, %x", "line 6 .*not closed"),
        ("= f32[8,128]{1,0:T(8,128)} add", "= f32[8,x]{1,0:T(8,128)} add", "line 6 .*not a shape"),
        ("= f32[8,128]{1,0:T(8,128)} add", "= add", "line 6 .*expected a shape"),
        ("stack_frame_id=2}", "stack_frame_id=2", "line 6 .*not closed"),
        (", metadata", ", meta,data", "line 6 .*expected an attribute, got ', meta'"),
        ("ROOT ", "", "line 4 .*%main has no ROOT"),
        ("  %twice", "  ROOT %twice", "line 7 .*second ROOT"),
        ("%twice =", "%x =", "line 6 .*%x stands there twice"),
        ("parameter(0)", "parameter(1)", r"line 4 .*declares 1 parameters.*\[1\]"),
        ("parameter(0)", "parameter(a)", "line 5 .*parameter's number is 'a'"),
        ("  %twice", " %twice", "line 5 .*expected attributes"),
        ("ENTRY %main", "%main", "before the ENTRY computation"),
        ("add(%x, %x)", "add(%x, %x), to_apply=%gone", "line 6 .*calls %gone"),
    ],
)
def test_damage_names_its_line(before, after, says):
    text = module(ENTRY)
    assert before in text
    with pytest.raises(DumpUnreadable, match=says):
        read_module(text.replace(before, after, 1))


def test_damaged_json_is_noticed():
    text = fixture("dot")
    with pytest.raises(DumpUnreadable, match=r"line \d+ of the HLO text: %\S+: Expecting"):
        read_module(text.replace('"estimated_cycles":"', '"estimated_cycles:"', 1))


def test_cycles_that_are_no_number_are_noticed():
    text = fixture("dot").replace('"estimated_cycles":"', '"estimated_cycles":"x', 1)
    (fusion,) = [i for i in read_module(text).entry.instructions if i.backend.get("window_config")]
    with pytest.raises(DumpUnreadable, match="has estimated_cycles 'x301616'"):
        _ = fusion.cycles
