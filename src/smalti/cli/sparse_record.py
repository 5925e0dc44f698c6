"""What `smalti estimate sparse` found, as JSON values and as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smalti.cli.bench_cases import FLAGS, OURS
from smalti.cli.sparse_cases import DENSE, DIM, HEADS, MASKS, Asked, Row, tasks
from smalti.estimate.tune import Trial

PEERS = ("splash", "xla")
Times = dict[str, float | None]


def record_of(
    asked: Asked, trials: Mapping[int, Trial], versions: Mapping[str, str]
) -> dict[str, Any]:
    """trials: by the number of the task, of those that are known."""
    best: dict[tuple[Row, str], Trial] = {}
    reasons: dict[tuple[Row, str], str] = {}
    for place, task in enumerate(tasks(asked)):
        key, trial = (task.row, task.variant.peer), trials.get(place)
        if trial is None or trial.time_ns is None:
            reasons.setdefault(key, "not compiled yet" if trial is None else str(trial.reason))
        elif key not in best or trial.time_ns < cast(float, best[key].time_ns):
            best[key] = trial
    time_ns = {key: cast(float, trial.time_ns) for key, trial in best.items()}
    found = [_row(chip, *mask, time_ns) for chip in asked.chips for mask in MASKS]
    return {
        "schema": 1,
        "kind": "sparse",
        "date_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "flags": list(FLAGS),
        "versions": dict(versions),
        "tasks": len(tasks(asked)),
        "known": len(trials),
        "rows": found,
        "reasons": [
            {
                "chip": row.chip,
                "S": row.length,
                "mask": row.mask,
                "pass": row.which,
                "peer": peer,
                "reason": text,
            }
            for (row, peer), text in reasons.items()
            if (row, peer) not in best
        ],
    }


def _row(
    chip: str, length: int, mask: str, time_ns: Mapping[tuple[Row, str], float]
) -> dict[str, Any]:
    """Times of the whole jitted calls; of the backward what both passes take over the forward."""

    def of(peer: str, mask: str, which: str) -> float | None:
        return time_ns.get((Row(chip, length, mask, which), peer))

    times: dict[str, Times] = {}
    for peer in (OURS, *PEERS, "tokamax"):
        forward, both = of(peer, mask, "forward"), of(peer, mask, "both")
        times[peer] = {"forward": forward, "backward": _minus(both, forward)}
    dense: Times = {}
    for which in ("forward", "backward"):
        known = []
        for peer in (OURS, "splash", "tokamax"):
            forward, both = of(peer, DENSE, "forward"), of(peer, DENSE, "both")
            known.append(forward if which == "forward" else _minus(both, forward))
        dense[which] = min((x for x in known if x is not None), default=None)
    ours = times[OURS]
    return {
        "chip": chip,
        "S": length,
        "mask": mask,
        "time_ns": times,
        "dense_time_ns": dense,
        "dense_over_ours": {k: _over(dense[k], ours[k]) for k in dense},
        "splash_over_ours": {k: _over(times["splash"][k], ours[k]) for k in dense},
        "xla_over_ours": {k: _over(times["xla"][k], ours[k]) for k in dense},
    }


def show(out: Console, record: Mapping[str, Any]) -> None:
    names = ("chip", "S", "mask", "pass", OURS, "dense ÷", "splash", "÷", "xla", "÷")
    table = Table(title=Text("sparse masks"), title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in ("chip", "mask", "pass") else "right")
    for row in record["rows"]:
        for which in ("forward", "backward"):
            times = row["time_ns"]
            table.add_row(
                *(row["chip"], f"{row['S']:,}", _short(row["mask"]), which),
                _us(times[OURS][which]),
                _times(row["dense_over_ours"][which]),
                _us(times["splash"][which]),
                _times(row["splash_over_ours"][which]),
                _us(times["xla"][which]),
                _times(row["xla_over_ours"][which]),
            )
    out.print(table)
    out.print(
        Text(
            "µs estimated, of the whole jitted call; backward: both passes less the forward; "
            "dense: the quickest causal kernel of ours and its peers; ÷: over ours. bfloat16, "
            f"B=1, {HEADS} heads of {DIM}; "
            + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        )
    )
    for one in record["reasons"][:5]:
        out.print(
            Text(f"{one['peer']}, {one['chip']}, {_short(one['mask'])}: {one['reason'][:150]}")
        )
    if record["known"] < record["tasks"]:
        out.print(f"incomplete: {record['known']} of {record['tasks']} programs are known")


def _short(mask: str) -> str:
    head, bracket, rest = mask.partition("[")
    return mask if not bracket else f"{head}[{rest.count(',') + 1} × …{rest[rest.index(']') :]}"


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _us(time_ns: float | None) -> str:
    return "–" if time_ns is None else f"{time_ns / 1e3:,.1f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
