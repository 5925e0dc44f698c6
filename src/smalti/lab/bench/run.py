"""Timing: everybody in one process, in turns, every sample kept."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from smalti.lab.bench import jax_peers, torch_peers
from smalti.lab.bench.cases import OURS, Case, Inputs, make_inputs
from smalti.lab.bench.torch_peers import Unavailable

# A short call is repeated within its turn, or a round would be too few samples of it.
TURN_S = 0.3
MOST_CALLS_A_TURN = 8
# What one leaves behind must not be charged to the next: idle threads that spin, and gigabytes of
# freed scores that the kernel takes back (seen: 140 instead of 85 ms after jax.nn with 0.02 s).
PAUSE_S = 1.0
# Beyond these, a peer computes something else, and its time says nothing. Relative to the largest
# element; they tell masks and conventions apart and are no measure of accuracy.
SAME = {"float32": 1e-3, "bfloat16": 5e-2}


@dataclass
class Timing:
    """What one implementation took: seconds per call, in the order taken."""

    samples_s: list[float] = field(default_factory=list)
    first_call_s: float = 0.0  # with compilation
    difference: float = 0.0  # from our output and gradients, relative to their largest elements

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


@dataclass
class Result:
    case: Case
    timings: dict[str, Timing]
    left_out: dict[str, str]  # peer → why it was not run

    def ratio(self, peer: str) -> float:
        """The peer's time in units of ours: above 1 we are faster."""
        return self.timings[peer].median_s / self.timings[OURS].median_s


def build(name: str, case: Case, inputs: Inputs) -> Callable[[], Any]:
    module = torch_peers if name.startswith("torch.") else jax_peers
    return module.build(name, case, inputs)


def to_numpy(name: str, result: Any, case: Case) -> list[np.ndarray]:
    if name.startswith("torch."):
        return torch_peers.to_numpy(result, case)
    return [np.asarray(x, np.float32) for x in (result if case.backward else (result,))]


def measure(case: Case, rounds: int, say: Callable[[str], None] = lambda _: None) -> Result:
    """Time `smalti` and the case's peers, turn about, for `rounds` rounds.

    Odd rounds go through them in the opposite order, so that a drift of the machine falls on all
    alike. Raises what `smalti` raises; a peer that cannot run is left out, with its reason.
    """
    inputs = make_inputs(case)
    calls: dict[str, Callable[[], Any]] = {}
    timings: dict[str, Timing] = {}
    left_out = dict(case.left_out)
    ours: list[np.ndarray] = []
    for name in (OURS, *case.peers):
        say(f"{case.name}: first call of {name}")
        try:
            call, first_s, result = _first_call(name, case, inputs)
        except Unavailable as reason:
            left_out[name] = str(reason)
            continue
        if name == OURS:
            ours = result
        gap = max(difference(a, b) for a, b in zip(ours, result, strict=True))
        if not gap <= SAME[case.dtype]:
            left_out[name] = f"it computes something else: results differ by {gap:.1%}"
            continue
        calls[name] = call
        timings[name] = Timing(first_call_s=first_s, difference=gap)

    repeats = {name: _calls_a_turn(call) for name, call in calls.items()}
    for turn in range(rounds):
        say(f"{case.name}: round {turn + 1} of {rounds}")
        for name in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            time.sleep(PAUSE_S)
            for _ in range(repeats[name]):
                timings[name].samples_s.append(_seconds(calls[name]))
    calls.clear()
    jax.clear_caches()
    gc.collect()
    return Result(case, timings, left_out)


def _first_call(name: str, case: Case, inputs: Inputs):
    start = time.perf_counter()
    try:
        call = build(name, case, inputs)
        result = to_numpy(name, call(), case)
    except Exception as error:
        # PyTorch's compiler fails in many ways, a missing C++ compiler among them.
        if name == OURS or isinstance(error, Unavailable):
            raise
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise Unavailable(f"{type(error).__name__}: {first_line}") from error
    return call, time.perf_counter() - start, result


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest one, relative to the largest element of ours."""
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(ours)))


def _calls_a_turn(call: Callable[[], Any]) -> int:
    return max(1, min(MOST_CALLS_A_TURN, int(TURN_S / max(_seconds(call), 1e-6))))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
