"""Two records, compared: totals, then source lines."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smalti.estimate.report.record import entries_of

TOTALS = ("cycles", "time_ns", "cycles_kernels", "bytes_hbm_read", "bytes_hbm_written")


@dataclass(frozen=True)
class Change:
    """One number of both; None where one of the two does not have it."""

    what: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True)
class Comparison:
    """Of two entries. `lines` are cycles, the largest changes first; equal ones only counted."""

    name: str
    label: str  # of the second; notes tell where the first has another
    totals: tuple[Change, ...]
    lines: tuple[Change, ...]
    lines_equal: int
    notes: tuple[str, ...] = field(default=())  # what differs besides, and may explain it all


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Comparison]:
    """Each entry that both records have; a function is compared with a function by any name.

    Raises ValueError for records of different kinds, and for two without an entry in common.
    """
    if before["kind"] != after["kind"]:
        raise ValueError(
            f"--diff: the first file is of `smalti estimate {before['kind']}`, the second of "
            f"`{after['kind']}`; compare two of one kind"
        )
    old, new = entries_of(before), entries_of(after)
    if before["kind"] == "fn":
        (old_name, one), (new_name, other) = *old.items(), *new.items()
        name = old_name if old_name == new_name else f"{old_name} → {new_name}"
        return [_compare(name, one, other)]
    common = [name for name in old if name in new]
    if not common:
        raise ValueError(
            f"--diff: the files have no entry in common: {', '.join(old) or 'none'} in the first, "
            f"{', '.join(new) or 'none'} in the second"
        )
    return [_compare(name, old[name], new[name], _settings(before, after)) for name in common]


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {old.get(key)} → {new.get(key)}"
        for old, new in (
            (before["case"], after["case"]),
            ({"pass": before["pass"]}, {"pass": after["pass"]}),
        )
        for key in old
        if old.get(key) != new.get(key)
    ]


def _compare(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], notes: list[str] | None = None
) -> Comparison:
    notes = list(notes or [])
    for key in ("chip", "topology", "variant", "flags", "versions", "label"):
        if old.get(key) != new.get(key):
            notes.append(f"{key} {_words(old.get(key))} → {_words(new.get(key))}")
    totals = [Change(key, old[key], new[key]) for key in TOTALS]
    totals.append(
        Change("peak_bytes", old["memory"]["peak_bytes"], new["memory"]["peak_bytes"]),
    )
    for unit in dict.fromkeys([*old["occupancy"], *new["occupancy"]]):
        shares = old["occupancy"].get(unit), new["occupancy"].get(unit)
        if any(shares):
            totals.append(Change(f"occupancy {unit}", *shares))
    before, after = cycles_by_line(old), cycles_by_line(new)
    changes = [
        Change(_line_name(key), before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
    ]
    changed = [change for change in changes if change.before != change.after]
    changed.sort(key=lambda change: -abs(change.difference))
    return Comparison(
        name,
        new["label"],
        tuple(totals),
        tuple(changed),
        len(changes) - len(changed),
        tuple(notes),
    )


# A line: its file's name, its text and how many like it stand before it. So a line that moved
# because others came in above it is still the same. Without a text, its number takes its place.
_Key = tuple[str, str, int]


def cycles_by_line(found: Mapping[str, Any]) -> dict[_Key, float]:
    """What lines own of all of an entry's cycles, times executions; they add up to its cycles."""
    pieces = [
        (line, line["cycles"] * kernel["executions"])
        for kernel in found["kernels"]
        for line in kernel["lines"]
    ]
    pieces += [
        ({**op, "what": f"{op['opcode']} {op['name']}"}, op["cycles"] * op["count"])
        for op in found["ops"]
        if op["kind"] != "kernel" and op["cycles"]
    ]
    owned: dict[tuple[str, str, int], float] = {}  # by file, text and number of the line
    for line, cycles in pieces:
        if line["file"] is None:
            place = ("", line["what"], 0)
        else:
            number = line["line"]
            place = (Path(line["file"]).name, line["text"] or f"line {number}", number)
        owned[place] = owned.get(place, 0.0) + cycles
    keyed: dict[_Key, float] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for file, text, number in sorted(owned):
        keyed[file, text, seen[file, text]] = owned[file, text, number]
        seen[file, text] += 1
    return keyed


def _line_name(key: _Key) -> str:
    file, text, nth = key
    again = f" ({nth + 1}.)" if nth else ""
    return f"{file}: {text}{again}" if file else f"{text}{again}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)
