"""From a search to an entry of a block table. `smalti.block_table` has the format."""

from collections.abc import Iterable, Mapping
from typing import Any

from smalti.estimate.tune.search import Found

# Two entries that differ in these alone say the same.
_INCIDENTAL = ("date", "command")
_SERVED = ("kernel", "chip", "same", "near")


def entry_of(
    found: Found,
    *,
    kernel: str,
    chip: str,
    same: Mapping[str, str | int],
    near: Mapping[str, int],
    searched: Mapping[str, Any],
    label: str,
    versions: Mapping[str, str],
    date: str,
    command: str,
) -> dict[str, Any]:
    """The best of a search, with where it comes from. ValueError: there is no best."""
    if not found.ranked:
        raise ValueError("found: no candidate has an estimate")
    (best, trial), *others = found.ranked
    assert trial.cycles is not None
    assert trial.time_ns is not None
    second = None
    if others:
        variant, other = others[0]
        assert other.cycles is not None
        second = {"blocks": dict(variant.blocks), "cycles": round(other.cycles)}
    return {
        "kernel": kernel,
        "chip": chip,
        "same": dict(same),
        "near": dict(near),
        "blocks": dict(best.blocks),
        "flags": list(best.flags),
        "cycles": round(trial.cycles),
        "time_ns": round(trial.time_ns),
        "label": label,
        "runner_up": second,
        "candidates": len(found.variants),
        "tried": len(found.trials),
        "missed": len(found.missed),
        "searched": dict(searched),
        "versions": dict(versions),
        "date": date,
        "command": command,
    }


def merged(entries: Iterable[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """`entries` with `new` in place of the one that serves the same class, if there is one.

    An old one that differs in date and command alone stays, so that a table changes only where a
    result did.
    """
    kept, replaced = [], new
    for entry in entries:
        if any(entry[key] != new[key] for key in _SERVED):
            kept.append(entry)
        elif _telling(entry) == _telling(new):
            replaced = entry
    return [*kept, replaced]


def _telling(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in _INCIDENTAL}
