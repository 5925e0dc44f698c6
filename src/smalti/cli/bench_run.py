"""The compiling of `smalti estimate bench`: every program once, remembered, a few at a time."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import smalti
from smalti.cli import output
from smalti.cli.bench_cases import OURS, Asked, Task, tasks
from smalti.cli.options import RESULTS
from smalti.cli.tune_run import versions_now
from smalti.estimate.compile.cache import cache_folder
from smalti.estimate.tune import Found, Journal, Trial, measure, search

# What of smalti a peer's result depends on; ours depends on all but what only prints or searches.
_OF_PEERS = (
    *("chips.py", "estimate/bundles", "estimate/compile", "estimate/module", "estimate/peers"),
    *("estimate/simulate", "estimate/result.py"),
)
_OF_NOBODY = ("cli", "lab", "estimate/calibrate", "estimate/report", "estimate/tune")


@dataclass(frozen=True)
class Bench:
    """Measures one task by its number. Picklable: each process lists the tasks anew."""

    asked: Asked

    def __call__(self, place: int) -> Trial:
        task = tasks(self.asked)[place]
        # A fresh one: what a variant has built it keeps, and there are a thousand of them.
        return measure(replace(task.variant), task.shape.chip)


def prepare(json: Path, chart: Path | None, journal: Path | None, jobs: int | None) -> Journal:
    """Checks that a comparison's files can be written, and opens its journal, before any work."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: at least 1")
    path = journal or cache_folder() / "bench.journal"
    for file, ours in ((json, RESULTS), (chart, RESULTS), (path, cache_folder())):
        if file is not None and file.parent == ours:
            ours.mkdir(parents=True, exist_ok=True)
    output.check(json, chart)
    try:
        return Journal(path)
    except OSError as error:
        raise ValueError(
            f"--journal {path} cannot be written: {error.strerror or error}"
        ) from error


def run(
    asked: Asked,
    journal: Journal,
    *,
    jobs: int,
    on_start: Callable[[int], None],
    on_done: Callable[[str], None],
) -> Found:
    """Trials by task. Ctrl-C ends it early, with `interrupted` set."""
    listed = tasks(asked)
    return search(
        [task.variant for task in listed],
        Bench(asked),
        journal,
        [key_of(task) for task in listed],
        jobs=jobs,
        on_start=on_start,
        on_trial=lambda variant: on_done(variant.peer),
    )


def key_of(task: Task) -> dict[str, Any]:
    """All that a task's trial depends on, so that a change of our kernels leaves peers alone."""
    variant, shape = task.variant, task.shape
    versions = {name: text for name, text in versions_now().items() if name != "smalti"}
    return {
        "bench": variant.peer,
        "chip": shape.chip,
        "pass": shape.which,
        "case": asdict(shape.case),
        "blocks": dict(variant.blocks),
        "flags": list(variant.flags),
        "versions": versions,
        "source": _source(variant.peer == OURS),
    }


@cache
def _source(ours: bool) -> str:
    return digest_of(lambda name: depends(name, ours))


def digest_of(chosen: Callable[[str], bool]) -> str:
    """Of the .py and .json files of smalti that are chosen by their names, as "masks/runs.py"."""
    root = Path(smalti.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
        name = path.relative_to(root).as_posix()
        if chosen(name):
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def depends(name: str, ours: bool) -> bool:
    """Whether a result depends on this file of smalti."""
    if ours:
        return not any(name.startswith(f"{part}/") for part in _OF_NOBODY)
    return any(name == part or name.startswith(f"{part}/") for part in _OF_PEERS)
