"""The search of `smalti estimate tune`, its versions, journal and tables on the screen."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

import smalti
from smalti.cli import output
from smalti.cli.progress import Progress
from smalti.cli.search import default_jobs
from smalti.cli.tune_subjects import Asked, Grid, grid_of
from smalti.estimate.tune import Found, Journal, Trial, measure, search


@dataclass(frozen=True)
class Search:
    """One command's search. Picklable: each process makes the candidates anew."""

    subject: str
    asked: Asked
    chip: str

    def __call__(self, place: int) -> Trial:
        return measure(grid_of(self.subject, self.asked).variants[place], self.chip)

    def run(
        self,
        grid: Grid,
        journal: Journal,
        *,
        before: Mapping[str, Any] | None,
        first: int | None,
        minutes: float | None,
        jobs: int | None,
    ) -> Found:
        """before: the entry that serves these shapes so far."""
        with Progress("candidates") as progress:
            return search(
                grid.variants,
                self,
                journal,
                self.keys(grid),
                order=_order(grid, before),
                first=first,
                seconds=None if minutes is None else 60 * minutes,
                jobs=jobs or default_jobs(),
                on_start=progress.start,
                on_trial=lambda variant: progress.advance(variant.peer),
            )

    def keys(self, grid: Grid) -> list[dict[str, Any]]:
        same = {
            "subject": self.subject,
            "chip": self.chip,
            "searched": dict(grid.searched),
            "versions": versions_now(),
            "source": _source(),
        }
        return [
            {**same, "blocks": dict(variant.blocks), "flags": list(variant.flags)}
            for variant in grid.variants
        ]


def _order(grid: Grid, before: Mapping[str, Any] | None) -> list[int]:
    """What was best before goes first, so that a search of few candidates does not undo it."""
    best: list[Any] = []
    if before is not None:
        best = [before["blocks"], (before["runner_up"] or {}).get("blocks")]

    def rank(place: int) -> int:
        blocks = dict(grid.variants[place].blocks)
        return best.index(blocks) if blocks in best else len(best)

    return sorted(range(len(grid.variants)), key=rank)


def label_of(chip: str, which: str | None, dtype: str | None) -> str:
    from smalti.estimate import trust

    return trust(chip, which or "forward", dtype or "bfloat16").label


def journal_at(table: Path) -> Journal:
    """The journal beside the table. Raises ValueError where no file can be written there."""
    path = table.with_name(table.name + ".journal")
    try:
        journal = Journal(path)
    except OSError as error:
        raise ValueError(
            f"--table {table} cannot be written: {path}: {error.strerror or error}"
        ) from error
    if journal.unreadable:
        lines = "one line" if journal.unreadable == 1 else f"{journal.unreadable} lines"
        print(f"{path}: {lines} cannot be read and will be searched again", file=sys.stderr)
    return journal


@cache
def versions_now() -> Mapping[str, str]:
    """Of what a result depends on, those that are installed."""
    found = {}
    for name in ("jax", "jaxlib", "libtpu", "smalti", "tokamax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _source() -> str:
    """What smalti itself is, more exactly than by its version: one may be at work on it."""
    root = Path(smalti.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def show(found: Found, label: str, most: int | None) -> None:
    """The candidates with an estimate, the best first, and why others have none."""
    out = output.console()
    ranked = found.ranked
    common = _common(found)
    if common:
        out.print(f"the same in all candidates: {_words(common)}", markup=False, soft_wrap=True)
    if ranked:
        shown = ranked[:most]
        rows = Table(title=Text(label), title_justify="left")
        for heading in ("cycles", "µs", "vs best", "HBM MB"):
            rows.add_column(heading, justify="right", no_wrap=True)
        rows.add_column("bound", no_wrap=True)
        rows.add_column("blocks", overflow="fold")
        best = ranked[0][1].cycles
        for variant, trial in shown:
            rows.add_row(*_cells(trial, best), _words(variant.blocks, common))
        out.print(rows, markup=False)
        if rest := len(ranked) - len(shown):
            out.print(f"and {rest} slower ones: --verbose shows all", markup=False)
    missed: dict[str, list[str]] = {}
    for variant, trial in found.missed:
        missed.setdefault(trial.reason or "", []).append(_words(variant.blocks, common))
    for reason, blocks in list(missed.items())[:most]:
        which = blocks[0] if len(blocks) == 1 else f"{len(blocks)} candidates"
        out.print(f"missed {which}: {reason}", markup=False, soft_wrap=True)
    if most is not None and len(missed) > most:
        out.print(f"and {len(missed) - most} other reasons: --verbose shows all", markup=False)


def _cells(trial: Trial, best: float | None) -> Sequence[str]:
    assert trial.cycles is not None
    assert trial.time_ns is not None
    assert trial.bytes_hbm is not None
    assert best is not None
    return (
        f"{trial.cycles:,.0f}",
        f"{trial.time_ns / 1e3:,.1f}",
        f"{trial.cycles / best:.3f}" if best else "",
        f"{trial.bytes_hbm / 1e6:,.2f}",
        trial.bound or "",
    )


def _common(found: Found) -> dict[str, Any]:
    """What every candidate has; nothing where there is one."""
    if len(found.variants) < 2:
        return {}
    first, *others = (variant.blocks for variant in found.variants)
    return {
        key: value
        for key, value in first.items()
        if all(key in blocks and blocks[key] == value for blocks in others)
    }


def _words(blocks: Mapping[str, Any], common: Mapping[str, Any] | None = None) -> str:
    left = {key: value for key, value in blocks.items() if key not in (common or {})}
    return " ".join(f"{key}={value}" for key, value in left.items())
