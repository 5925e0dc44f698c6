"""`smalti estimate sparse`: what our attention gains from masks that leave tiles out."""

import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from smalti.cli.failing import STOPPED, Failed
from smalti.cli.options import RESULTS


def sparse(
    chips: Annotated[str, typer.Option(metavar="CHIP,…")] = "v5e,v6e,v7x",
    xla: Annotated[
        bool, typer.Option(help="Masked softmax by XLA as well, which compiles for minutes.")
    ] = True,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many to compile at a time; 2 where there are cores."),
    ] = None,
    json: Annotated[
        Path, typer.Option("--json", metavar="FILE|-", help="Everything; - to stdout.")
    ] = RESULTS / "sparse-tpu-estimate.json",
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What is known so far; bench.journal in the cache's folder."
        ),
    ] = None,
) -> None:
    """Windows, StreamingLLM and documents beside dense causal attention, splash and masked XLA.

    bfloat16, 8 heads of 128, for TPUs by estimate. Stopped and started again, it goes on.
    """
    from smalti.cli import output
    from smalti.cli.bench_run import prepare
    from smalti.cli.progress import Progress
    from smalti.cli.search import default_jobs
    from smalti.cli.sparse_cases import Asked, tasks
    from smalti.cli.sparse_record import record_of, show
    from smalti.cli.tune_run import versions_now
    from smalti.estimate.tune import search

    asked = Asked(chips=tuple(dict.fromkeys(word.strip() for word in chips.split(","))), xla=xla)
    known = prepare(json, None, journal, jobs)
    listed = tasks(asked)
    with Progress("programs") as progress:
        found = search(
            [task.variant for task in listed],
            Sparse(asked),
            known,
            [key_of(task) for task in listed],
            jobs=jobs or default_jobs(),
            on_start=progress.start,
            on_trial=lambda variant: progress.advance(variant.peer),
        )
    record = record_of(asked, found.trials, versions_now())
    output.write(record, json, None, None)
    if json != output.STDOUT:
        show(output.console(), record)
    print(f"{found.remembered} of {len(found.trials)} programs were known", file=sys.stderr)
    if found.interrupted:
        raise Failed(STOPPED, 130)


@dataclass(frozen=True)
class Sparse:
    """Measures one task by its number. Picklable: each process lists the tasks anew."""

    asked: Any

    def __call__(self, place: int):
        from smalti.cli.sparse_cases import tasks
        from smalti.estimate.tune import measure

        task = tasks(self.asked)[place]
        return measure(replace(task.variant), task.row.chip)


def key_of(task) -> dict[str, Any]:
    """As `bench` has it, whose dense rows are the same. Of the others, a peer's program too depends
    on what makes the masks and puts them into calls."""
    from smalti.cli import bench_cases, bench_run
    from smalti.cli.sparse_cases import DENSE

    row = task.row
    key = bench_run.key_of(
        bench_cases.Task(bench_cases.Shape(row.chip, row.which, row.case), task.variant)
    )
    if row.mask != DENSE:
        key["case"] = {**asdict(row.case), "mask": row.mask}
        key["built_by"] = _built_by()
    return key


@cache
def _built_by() -> str:
    from smalti.cli.bench_run import digest_of

    return digest_of(builds)


def builds(name: str) -> bool:
    """Whether a masked program is built by this file of smalti."""
    return name == "cli/sparse_cases.py" or name.startswith("masks/")
