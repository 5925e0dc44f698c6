"""Decoding: a token over a ring buffer, early and late, beside attention over the text so far."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import smalti
from smalti.lab.bench.cases import SINK_TOKENS, Case, make_inputs
from smalti.lab.bench.report import asked
from smalti.lab.bench.run import PAUSE_S, SAME, Timing, difference

EARLY, LATE, RECOMPUTED = "early", "late", "recomputation"


@dataclass(frozen=True)
class DecodeCase:
    """A cache of S tokens that is full at S tokens, and after `late`; `steps` are one sample."""

    S: int = 2048
    late: int = 20_000
    steps: int = 50
    least_ratio: float | None = 50.0  # of recomputation to a token, early
    flat_within: float | None = 0.1

    @property
    def name(self) -> str:
        return f"decode/f32/{self.S}"


def quick(case: DecodeCase) -> DecodeCase:
    small = {"S": case.S // 8, "late": case.late // 8, "steps": 5}
    return dataclasses.replace(case, **small, least_ratio=None, flat_within=None)


@dataclass
class Decoded:
    """Seconds for a token, by EARLY, LATE and RECOMPUTED."""

    case: DecodeCase
    timings: dict[str, Timing] = field(default_factory=dict)

    def ratio(self, name: str) -> float:
        return self.timings[name].median_s / self.timings[EARLY].median_s


def measure_decode(
    case: DecodeCase, rounds: int, say: Callable[[str], None] = lambda _: None
) -> Decoded:
    """In turns, every second round the other way around; raises where the two differ."""
    say(f"{case.name}: first calls")
    inputs = make_inputs(Case("causal", case.S))
    q, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    last = tuple(x[:, -1:] for x in (q, k, v))
    attend = jax.jit(lambda q, cache, k, v: smalti.decode.attend(q, cache, k, v), donate_argnums=1)
    append = jax.jit(smalti.decode.append)
    forward = jax.jit(lambda q, k, v: smalti.attention(q, k, v, mask=smalti.masks.causal()))

    B, _, H, D = k.shape
    sizes = {"sinks": SINK_TOKENS, "window": case.S - SINK_TOKENS, "dtype": k.dtype}
    empty = smalti.decode.RingBuffer.empty(B, H, D, **sizes)
    out, early = attend(last[0], append(empty, k[:, :-1], v[:, :-1]), *last[1:])
    gap = difference(np.asarray(forward(q, k, v)[:, -1:]), np.asarray(out))
    if not gap <= SAME["float32"]:
        raise AssertionError(f"{case.name}: decoding differs from attention by {gap:.1%}")
    # Each with a cache of its own, for a step gives away the one that it is passed.
    late = jax.tree.map(jnp.copy, early)
    while int(late.length[0]) < case.late:
        count = min(case.S, case.late - int(late.length[0]))
        late = append(late, k[:, :count], v[:, :count])
    caches: dict[str, Any] = {EARLY: early, LATE: late}

    def seconds(name: str) -> float:
        start, steps = time.perf_counter(), 1
        if name == RECOMPUTED:
            jax.block_until_ready(forward(q, k, v))
        else:
            steps = case.steps
            for _ in range(steps):
                out, caches[name] = attend(last[0], caches[name], *last[1:])
                out.block_until_ready()  # the next token depends on it
        return (time.perf_counter() - start) / steps

    found = Decoded(case, {name: Timing() for name in (EARLY, LATE, RECOMPUTED)})
    found.timings[RECOMPUTED].difference = gap
    for turn in range(rounds):
        say(f"{case.name}: round {turn + 1} of {rounds}")
        for name in list(found.timings) if turn % 2 == 0 else reversed(found.timings):
            time.sleep(PAUSE_S)
            for _ in range(3):
                found.timings[name].samples_s.append(seconds(name))
    return found


def print_decode(console: Console, found: Decoded) -> None:
    case = found.case
    table = Table(title=f"{case.name}, a token", title_justify="left")
    table.add_column("", min_width=10)
    for heading in ("median ms", "min – max ms", "samples", "÷ early", "asked"):
        table.add_column(heading, justify="right", no_wrap=True)
    words = {
        EARLY: (f"decoding at {case.S:,}", ""),
        LATE: (f"decoding at {case.late:,}", _flat(case, found.ratio(LATE))),
        RECOMPUTED: (f"attention over {case.S:,}", _faster(case, found.ratio(RECOMPUTED))),
    }
    for name, (title, verdict) in words.items():
        samples = found.timings[name].samples_s
        table.add_row(
            title,
            f"{found.timings[name].median_s * 1e3:.3f}",
            f"{min(samples) * 1e3:.3f} – {max(samples) * 1e3:.3f}",
            str(len(samples)),
            f"{found.ratio(name):.2f}×",
            verdict,
        )
    console.print(table)


def _flat(case: DecodeCase, ratio: float) -> str:
    if case.flat_within is None:
        return ""
    return asked(f"within {case.flat_within:.0%}", abs(ratio - 1) <= case.flat_within)


def _faster(case: DecodeCase, ratio: float) -> str:
    if case.least_ratio is None:
        return ""
    return asked(f"≥ {case.least_ratio:g}×", ratio >= case.least_ratio)


def decode_record(found: Decoded) -> dict[str, Any]:
    return {
        "name": found.case.name,
        "case": dataclasses.asdict(found.case),
        "implementations": {
            name: {
                **dataclasses.asdict(timing),
                "median_s": timing.median_s,
                "ratio_to_early": found.ratio(name),
            }
            for name, timing in found.timings.items()
        },
    }
