import dataclasses
import json

import pytest

from smalti.chips import TENSOR_CORES
from smalti.estimate import estimate
from smalti.estimate.report.entry import UNITS_OF_TIME, entry, lowered_words
from tests.estimate.report.programs import estimated, program


@pytest.mark.parametrize("name", ["double", "jax_flash", "xla"])
def test_it_is_json_and_agrees_with_the_estimate(name):
    result = estimated(name)
    found = entry(result, label="estimate; of a test", variant="v")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["cycles"] == result.cycles
    assert found["time_ns"] == pytest.approx(result.cycles / 1.75)
    assert found["bytes_hbm"] == found["bytes_hbm_read"] + found["bytes_hbm_written"]
    assert found["bound"] == result.bound
    assert found["occupancy"] == result.occupancy
    assert found["label"] == "estimate; of a test"
    assert found["variant"] == "v"
    assert found["versions"]["libtpu"]
    assert found["unit"] == "one TensorCore, which is the whole chip"
    total = sum(op["cycles"] * op["count"] for op in found["ops"] if op["cycles"])
    assert total == pytest.approx(found["cycles"])
    assert 0 < found["bound_time_ns"] < found["time_ns"]


def test_kernels_with_their_lines_and_scratch():
    (kernel,) = entry(estimated("jax_flash"), label="")["kernels"]
    assert kernel["executions"] == 1
    assert kernel["vmem_bytes"] > 128 * 128 * 2
    assert sum(line["cycles"] for line in kernel["lines"]) == pytest.approx(kernel["cycles"])
    assert kernel["bytes"]["hbm_to_vmem"] >= 3 * 256 * 128 * 2


def test_the_text_of_a_line_is_shown_where_its_file_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "programs.py").write_text("\n" * 20 + "y = x_ref[...] * 2\n" * 60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (kernel,) = entry(estimated("double"), label="")["kernels"]
    texts = {line["text"] for line in kernel["lines"] if line["file"]}
    assert texts == {"y = x_ref[...] * 2"}


def test_what_was_lowered_is_named():
    words = lowered_words(entry(estimated("double"), label=""))
    assert words == "1 Pallas kernel (double.1)"
    assert lowered_words(entry(estimated("xla"), label="")) == "no Pallas kernel: XLA alone"


def test_the_choice_of_smalti_is_named():
    """`smalti.attention` puts its implementation into the names of its operations."""
    compiled = program("xla")
    named = compiled.hlo.replace(
        'op_name="jit(xla_forward)/', 'op_name="jit(f)/smalti.attention[blockwise]/'
    )
    assert named != compiled.hlo
    found = entry(estimate(dataclasses.replace(compiled, hlo=named)), label="")
    assert found["lowered"]["smalti_attention"] == ["blockwise"]
    assert lowered_words(found) == (
        "no Pallas kernel: XLA alone; smalti.attention ran as 'blockwise'"
    )


def test_every_chip_says_what_its_unit_is():
    assert UNITS_OF_TIME.keys() == TENSOR_CORES.keys()
    assert all("one TensorCore" in text for text in UNITS_OF_TIME.values())
    assert "megacore" in UNITS_OF_TIME["v4"]
    assert "megacore" in UNITS_OF_TIME["v5p"]
