"""The harness at tiny shapes: it measures what it says. How fast anything is, these cannot say."""

import dataclasses
import itertools
import warnings

import pytest

from smalti.lab.bench import jax_peers, run
from smalti.lab.bench.cases import OURS, Case, make_inputs

slow = pytest.mark.slow
MASKS = ("causal", "window", "streaming", "documents", "documents-known")


def tiny(mask: str, **changes) -> Case:
    """Longer than the window, so that every mask hides something that causal does not."""
    return dataclasses.replace(Case(mask, 640, peers=("jax.nn", "plain")), **changes)


@pytest.fixture(autouse=True)
def _one_call_a_turn(monkeypatch):
    monkeypatch.setattr(run, "TURN_S", 0.0)


@pytest.mark.parametrize(
    ("mask", "backward"),
    [
        ("documents", False),
        *(pytest.param(mask, False, marks=slow) for mask in MASKS if mask != "documents"),
        pytest.param("streaming", True, marks=slow),
    ],
)
def test_all_jax_peers_compute_the_same(mask, backward):
    case = tiny(mask, backward=backward)
    result = run.measure(case, rounds=1)
    assert result.left_out == {}
    assert list(result.timings) == [OURS, "jax.nn", "plain"]
    assert all(0 <= timing.difference < run.SAME["float32"] for timing in result.timings.values())


@slow
@pytest.mark.parametrize(("mask", "backward"), [("causal", True), ("documents", False)])
def test_torch_sdpa_computes_the_same(mask, backward):
    pytest.importorskip("torch", reason="the PyTorch peers need `make bench`")
    result = run.measure(tiny(mask, backward=backward, peers=("torch.sdpa",)), rounds=1)
    assert result.left_out == {}
    assert "torch.sdpa" in result.timings


@slow
def test_torch_flex_computes_the_same_or_says_why_not():
    pytest.importorskip("torch", reason="the PyTorch peers need `make bench`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's compiler, whatever it is today
        result = run.measure(tiny("streaming", peers=("torch.flex",)), rounds=1)
    reason = result.left_out.get("torch.flex")
    assert ("torch.flex" in result.timings) != (reason is not None)
    assert reason is None or "computes something else" not in reason


def test_a_peer_that_computes_something_else_is_left_out(monkeypatch):
    def wrong(case, inputs):
        attend, extra = jax_peers._plain(dataclasses.replace(case, mask="causal"), inputs)
        return attend, extra

    monkeypatch.setattr(jax_peers, "_jax_nn", wrong)
    result = run.measure(tiny("window"), rounds=1)
    assert "jax.nn" not in result.timings
    assert "it computes something else: results differ by" in result.left_out["jax.nn"]


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch):
    def fails(case, inputs):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(jax_peers, "_plain", fails)
    result = run.measure(tiny("causal"), rounds=1)
    assert result.left_out == {"plain": "RuntimeError: no compiler"}


def test_our_own_failure_is_never_left_out(monkeypatch):
    def fails(case, inputs):
        raise RuntimeError("broken")

    monkeypatch.setattr(jax_peers, "_ours", fails)
    with pytest.raises(RuntimeError, match="broken"):
        run.measure(tiny("causal"), rounds=1)


def test_turns_alternate_in_direction_and_every_sample_is_kept(monkeypatch):
    order = []
    clock = itertools.count()

    def build(name, case, inputs):
        real = jax_peers.build("plain", case, inputs)

        def call():
            order.append(name)
            return real()

        return call

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run.time, "perf_counter", lambda: float(next(clock)))
    result = run.measure(tiny("causal"), rounds=3)
    # By that clock a call takes a second. Before the first round each has been called once to
    # compile and once to see how long it takes.
    there = [OURS, "jax.nn", "plain"]
    assert order[6:] == there + there[::-1] + there
    assert [result.timings[name].samples_s for name in there] == [[1.0] * 3] * 3
    assert result.ratio("plain") == 1.0


def test_bfloat16_inputs_give_bfloat16_results():
    case = tiny("causal", dtype="bfloat16")
    assert str(run.build(OURS, case, make_inputs(case))().dtype) == "bfloat16"
