"""What `smalti estimate bench` found, as JSON values: rows, geometric means, bars and the floor."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from smalti.chips import TENSOR_CORES
from smalti.cli.bench_cases import FLAGS, OURS, PEERS, Asked, Shape, Task, shapes, tasks
from smalti.estimate import trust
from smalti.estimate.peers import AttentionCase
from smalti.estimate.tune import Trial

# Of the best peer's time: the geometric mean of each pass, and the worst shape.
BARS = {"forward": 0.75, "both": 0.80}
WORST = 1.0
ALL = "all"  # chips
_REGISTER = 8 * 128  # scores in one; the EUP takes one a cycle, as every chip's dumps say
# Products over visible pairs: those that contract the head dim (QKᵀ; in the backward QKᵀ again and
# dO·Vᵀ), and the others (PV; dV, dQ and dK).
_PRODUCTS = {"forward": (1, 1), "both": (3, 4)}
_EXPONENTIALS = {"forward": 1, "both": 2}

Row = dict[str, Any]


def record_of(
    asked: Asked, trials: Mapping[int, Trial], versions: Mapping[str, str]
) -> dict[str, Any]:
    """trials: by the number of the task, of those that are known."""
    by_shape: dict[Shape, list[tuple[Task, Trial | None]]] = {}
    for place, task in enumerate(tasks(asked)):
        by_shape.setdefault(task.shape, []).append((task, trials.get(place)))
    rows = [_row(shape, by_shape[shape]) for shape in shapes(asked)]
    return {
        "schema": 1,
        "kind": "bench",
        "date_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "asked": asdict(asked),
        "flags": list(FLAGS),
        "versions": dict(versions),
        "labels": {
            chip: {which: trust(chip, which).label for which in asked.passes}
            for chip in asked.chips
        },
        "tasks": len(tasks(asked)),
        "known": len(trials),
        "rows": rows,
        "summary": summary(rows),
    }


def floor(case: AttentionCase, which: str, chip: str) -> dict[str, Any]:
    """What no kernel can beat that keeps no scores: the busier of MXU and EUP, on visible pairs.

    EUP: one exponential in float32 for each pair, and one more in a backward.
    MXU: products at the array's full rate, but those that contract the head dim feed only D of its
    128 or 256 rows: D counts up to whole arrays there. `mxu_peak_time_ns` leaves that out: it is
    FLOPs over the peak rate.
    """
    core = TENSOR_CORES[chip]
    pairs = case.B * case.Hq * case.Sq * (case.Sq + 1) // 2
    side = core.mxu_side
    per_cycle = core.mxus * core.mxu_rows_per_cycle * side * side  # multiply-adds
    over_dim, others = _PRODUCTS[which]
    fed = math.ceil(case.D / side) * side
    cycles = {
        "mxu": pairs * (over_dim * fed + others * case.D) / per_cycle,
        "mxu_peak": pairs * (over_dim + others) * case.D / per_cycle,
        "eup": pairs * _EXPONENTIALS[which] / _REGISTER,
    }
    unit = max(("mxu", "eup"), key=cycles.__getitem__)
    times = {name: n / core.clock_hz * 1e9 for name, n in cycles.items()}
    return {
        "unit": unit.upper(),
        "time_ns": times[unit],
        **{f"{name}_time_ns": value for name, value in times.items()},
    }


def _row(shape: Shape, found: Iterable[tuple[Task, Trial | None]]) -> Row:
    case = shape.case
    best: dict[str, dict[str, Any] | None] = dict.fromkeys((OURS, *PEERS))
    reasons: dict[str, str] = {}
    tried: dict[str, list[dict[str, Any]]] = {name: [] for name in best}
    for task, trial in found:
        name, blocks = task.variant.peer, dict(task.variant.blocks)
        if trial is None:
            reasons.setdefault(name, "not compiled yet")
            continue
        tried[name].append({"blocks": blocks, "cycles": trial.cycles, "reason": trial.reason})
        if trial.reason is not None:
            reasons[name] = trial.reason
            continue
        before = best[name]
        if before is None or trial.cycles < before["cycles"]:
            best[name] = {"blocks": blocks, **trial.values()}
    ours, peers = best[OURS], {name: best[name] for name in PEERS}
    known = {name: one for name, one in peers.items() if one}
    quickest = min(known, key=lambda name: known[name]["cycles"], default=None)
    least = floor(case, shape.which, shape.chip)
    row: Row = {
        "chip": shape.chip,
        "pass": shape.which,
        **{key: getattr(case, key) for key in ("B", "Hq", "Hkv", "D")},
        "S": case.Sq,
        "ours": ours,
        "peers": peers,
        "reasons": {name: text for name, text in reasons.items() if best[name] is None},
        "best_peer": quickest,
        "ratio": None,
        "kernels_ratio": None,
        "floor": least,
        "floor_over_ours": None if ours is None else least["time_ns"] / ours["time_ns"],
        "tried": tried,
    }
    if ours is not None and quickest is not None:
        peer = known[quickest]
        row["ratio"] = ours["cycles"] / peer["cycles"]
        row["kernels_ratio"] = ours["kernels_time_ns"] / peer["kernels_time_ns"]
    return row


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By pass and chip, then by pass over all chips: ratios to the best peer, and the bars.

    `met` is None while a shape has no ratio.
    """
    found = []
    for which in dict.fromkeys(row["pass"] for row in rows):
        same = [row for row in rows if row["pass"] == which]
        chips = list(dict.fromkeys(row["chip"] for row in same))
        for chip in [*chips, ALL] if len(chips) > 1 else chips:
            found.append(_summary(which, chip, [r for r in same if chip in (ALL, r["chip"])]))
    return found


def _summary(which: str, chip: str, rows: Sequence[Row]) -> dict[str, Any]:
    compared = [row for row in rows if row["ratio"] is not None]
    complete = len(compared) == len(rows)
    mean, worst = _mean(row["ratio"] for row in compared), None
    if compared:
        row = max(compared, key=lambda row: row["ratio"])
        keys = ("chip", "D", "S", "Hkv", "ratio", "best_peer")
        worst = {key: row[key] for key in keys}
    return {
        "pass": which,
        "chip": chip,
        "shapes": len(rows),
        "compared": len(compared),
        "ratio": mean,
        "kernels_ratio": _mean(row["kernels_ratio"] for row in compared),
        "floor_over_ours": _mean(row["floor_over_ours"] for row in compared),
        "worst": worst,
        "bar": BARS[which],
        "met": mean <= BARS[which] if mean and complete else None,
        "worst_bar": WORST,
        "worst_met": worst["ratio"] <= WORST if worst and complete else None,
    }


def _mean(values: Iterable[float]) -> float | None:
    """Geometric."""
    values = list(values)
    return statistics.geometric_mean(values) if values else None
