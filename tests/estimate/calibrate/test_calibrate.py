"""Published rows, the fit, what is written about it, and the label of every number."""

import importlib
import importlib.util
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from smalti.chips import TENSOR_CORE_SOURCES, TENSOR_CORES, TensorCore
from smalti.estimate import EstimateError
from smalti.estimate.calibrate import calibrate
from smalti.estimate.calibrate.fit import fit, leave_one_out, relative_error, wrong_orders
from smalti.estimate.calibrate.predict import LATENCIES_NS, PUSH_SHARES, Constants, Subject
from smalti.estimate.calibrate.report import assess, constants_in_use
from smalti.estimate.calibrate.rows import Row, published
from smalti.estimate.trust import ERRORS, Trust, trust, write_errors

ROOT = Path(__file__).resolve().parents[3]
TRUE = Constants(540.0, 0.30, 100e-6)


def row(name: str, chip: str = "v5e", dispatch: bool = False, seconds: float = 1.0) -> Row:
    return Row(
        name, chip, "pallas matmul tutorial", name, seconds, dispatch, "made up", "published"
    )


def subject(name: str, latency: float, share: float, base: float, **kinds) -> Subject:
    """A row whose cycles are linear, and whose published time is what TRUE gives."""
    by_latency = np.array([base + latency * ns + share * PUSH_SHARES[1] for ns in LATENCIES_NS])
    by_share = np.array([base + latency * LATENCIES_NS[1] + share * s for s in PUSH_SHARES])
    made = Subject(row(name, **kinds), "a variant", by_latency, by_share)
    return replace(made, row=replace(made.row, seconds=made.seconds(TRUE)))


SUBJECTS = [
    subject("copies", 1e3, 0.0, 1e5),
    subject("copies, timed from the host", 1e3, 0.0, 3e4, dispatch=True),
    subject("weights", 0.0, 1e6, 1e6),
    subject("weights, timed from the host", 0.0, 1e6, 1e5, dispatch=True),
    subject("plain, from the host", 0.0, 0.0, 3e5, dispatch=True),
    subject("v7x", 0.0, 0.0, 1e6, chip="v7x"),
    subject("v7x too", 0.0, 0.0, 2e6, chip="v7x"),
]


def test_a_fit_finds_what_made_the_rows():
    found = fit(SUBJECTS)
    assert found.dma_latency_ns == pytest.approx(TRUE.dma_latency_ns)
    assert found.mxu_push_share == pytest.approx(TRUE.mxu_push_share)
    assert found.dispatch_s == pytest.approx(TRUE.dispatch_s)
    assert max(abs(relative_error(s, found)) for s in SUBJECTS) < 1e-6


def test_a_row_left_out_does_not_set_its_own_prediction():
    wrong = replace(SUBJECTS[0], row=replace(SUBJECTS[0].row, seconds=SUBJECTS[0].row.seconds / 2))
    errors = leave_one_out([wrong, *SUBJECTS[1:]])
    assert errors[0] == pytest.approx(1.0, abs=1e-6)  # twice the published time


def test_an_order_predicted_wrongly_is_found():
    a, b = SUBJECTS[2], subject("weights", 0.0, 1e6, 2e6)
    assert wrong_orders([a, b], TRUE) == []
    swapped = replace(b, row=replace(b.row, seconds=a.row.seconds / 2, id="swapped"))
    assert wrong_orders([a, swapped], TRUE) == [("weights", "swapped")]


def test_a_row_that_dispatch_carries_is_in_no_median():
    tiny = subject("tiny", 0.0, 0.0, 1e4, dispatch=True)
    tiny = replace(tiny, row=replace(tiny.row, seconds=1.0))  # off by as much as can be
    result = assess([*SUBJECTS, tiny], {}, {})
    carried = {r.id for r in result.rows if r.carried_by_dispatch}
    assert "tiny" in carried
    assert carried.isdisjoint(r.id for r in result.of_file("published"))
    assert result.worst_abs_error < 0.3
    assert result.to_json()["median_abs_error"] == result.median_abs_error


def test_every_published_row_is_there_and_names_its_source():
    rows = published()
    assert len(rows) == len({r.id for r in rows})
    assert sum(r.file == "published" for r in rows) == 13
    assert all(r.source and r.seconds > 0 and r.chip.split("-")[0] in TENSOR_CORES for r in rows)
    assert {r.id for r in rows if not r.names_a_kernel} == {
        "v6e-16-nanogpt-xla",
        "v6e-16-nanogpt-pallas",
    }


@pytest.mark.parametrize("one", [r for r in published() if "matmul" in r.id], ids=lambda r: r.id)
def test_a_product_is_the_published_one(one):
    (variant,) = one.candidates()
    x, y = variant.args
    assert one.shape == f"{x.shape[0]}x{x.shape[1]}x{y.shape[1]} bf16"
    assert tuple(variant.blocks.values()) == one.blocks


def test_without_tokamax_its_rows_say_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    one = next(r for r in published() if r.chip == "v7x")
    with pytest.raises(EstimateError, match="tokamax is not installed"):
        one.candidates()


def test_every_constant_has_a_source():
    fields = set(TensorCore.__dataclass_fields__) - {"chip"}
    assert set(TENSOR_CORE_SOURCES) == fields
    assert all(len(text) > 5 for text in TENSOR_CORE_SOURCES.values())


def test_the_constants_in_use_are_those_of_the_chips():
    constants = constants_in_use()
    assert constants.dma_latency_ns == pytest.approx(TENSOR_CORES["v6e"].dma_latency_s * 1e9)
    assert constants.mxu_push_share == TENSOR_CORES["v7x"].mxu_push_share


def test_labels():
    assert trust("v6e").label.startswith("estimate; 6 published times of bfloat16 kernels on v6e, ")
    assert trust("v4").label == (
        "estimate; uncalibrated: no published time of bfloat16 kernels on v4 is known"
    )
    assert trust("v6e", "both").label == (
        "estimate; uncalibrated: no published time of bfloat16 backward kernels on v6e is known"
    )
    assert "uncalibrated" in trust("v6e", dtype="float32").label
    assert len(trust("v7x", "backward").errors) == 2
    assert Trust("such kernels", (0.01, -0.03)).label == (
        "estimate; 2 published times of such kernels, each left out of the fit, were off by 2% in "
        "the median, 3% at worst"
    )


def test_errors_are_kept_and_read(tmp_path, monkeypatch):
    module = importlib.import_module("smalti.estimate.trust")
    monkeypatch.setattr(module, "ERRORS", tmp_path / "errors.json")
    trust.cache_clear()
    result = assess(SUBJECTS, {}, {"libtpu": "1"})
    write_errors(result.rows, result.versions)
    assert len(trust("v7x").errors) == 2
    assert json.loads((tmp_path / "errors.json").read_text())["versions"] == {"libtpu": "1"}
    trust.cache_clear()


def test_the_document_shows_the_errors_that_are_kept():
    text = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
    kept = json.loads(ERRORS.read_text(encoding="utf-8"))["rows"]
    assert len(kept) == 23
    for one in kept:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {one['id']} ")]
        assert line.endswith(f"| {one['error']:+.1%} | {one['left_out_error']:+.1%} |")


def same_versions() -> bool:
    kept = json.loads(ERRORS.read_text(encoding="utf-8"))["versions"]
    try:
        return all(metadata.version(name) == kept[name] for name in ("jaxlib", "libtpu"))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not same_versions(), reason="errors.json was found with other versions")
def test_predictions_are_what_was_kept():
    """Of two products; all of them: `smalti estimate calibrate`."""
    kept = {r["id"]: r["error"] for r in json.loads(ERRORS.read_text(encoding="utf-8"))["rows"]}
    names = ("v5e-matmul-128-1024", "v5e-matmul-512-4096")
    result = calibrate(only=lambda one: one.id in names)
    assert [r.id for r in result.rows] == list(names)
    for found in result.rows:
        assert found.error == pytest.approx(kept[found.id], abs=2e-3)
