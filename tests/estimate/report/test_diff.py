import copy

import pytest

from smalti.estimate.report import compare
from smalti.estimate.report.diff import cycles_by_line
from tests.estimate.report import records


@pytest.mark.parametrize("name", ["double", "jax_flash", "xla"])
def test_lines_add_up_to_the_whole(name):
    record = records.fn(name)
    assert sum(cycles_by_line(record).values()) == pytest.approx(record["cycles"])


def test_a_run_equals_itself():
    for one in compare(records.attention(), records.attention()):
        assert one.lines == ()
        assert one.lines_equal > 0
        assert one.notes == ()
        assert all(change.difference == 0 for change in one.totals)


def test_changes_are_found_the_largest_first():
    before, after = records.fn(), copy.deepcopy(records.fn())
    first, second = [line for line in after["kernels"][0]["lines"] if line["file"]][:2]
    first["cycles"] += 5
    second["cycles"] -= 100
    after["cycles"] -= 95
    after["chip"] = "v5e"
    (one,) = compare(before, after)
    assert [change.difference for change in one.lines] == pytest.approx([-100, 5])
    assert one.totals[0].what == "cycles"
    assert one.totals[0].difference == -95
    assert one.notes == ("chip v6e → v5e",)


def test_a_line_that_moved_is_the_same_line():
    before, after = copy.deepcopy(records.fn()), copy.deepcopy(records.fn())
    for record, moved in ((before, 0), (after, 10)):
        for number, line in enumerate(record["kernels"][0]["lines"]):
            if line["file"]:
                line["line"] += moved
                line["text"] = f"statement {number}"
    (one,) = compare(before, after)
    assert one.lines == ()


def test_lines_alike_are_told_apart_by_their_order():
    record = copy.deepcopy(records.fn())
    for line in record["kernels"][0]["lines"]:
        line["text"] = "same" if line["file"] else None
    keys = [key for key in cycles_by_line(record) if key[1] == "same"]
    assert [key[2] for key in keys] == list(range(len(keys)))
    assert len(keys) > 1


def test_a_new_line_has_no_before():
    before, after = records.fn(), copy.deepcopy(records.fn())
    line = {"file": "new.py", "line": 3, "what": None, "text": None, "cycles": 7.0}
    after["kernels"][0]["lines"].append(line)
    (one,) = compare(before, after)
    assert [(c.what, c.before, c.after) for c in one.lines] == [("new.py: line 3", None, 7.0)]


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match="the first file is of `smalti estimate attention`"):
        compare(records.attention(), records.fn())
    other = copy.deepcopy(records.attention())
    other["peers"] = {"tokamax": other["peers"]["xla"]}
    with pytest.raises(ValueError, match="no entry in common: jax_flash, xla in the first, tokam"):
        compare(records.attention(), other)


def test_another_case_is_noted():
    other = copy.deepcopy(records.attention())
    other["case"]["Sq"] = 512
    assert compare(records.attention(), other)[0].notes == ("Sq 256 → 512",)
