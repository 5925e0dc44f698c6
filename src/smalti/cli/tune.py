"""`smalti estimate tune`: the block sizes of least cycles, into a table that kernels read."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from smalti.cli.failing import Failed
from smalti.cli.options import Chip

_SHOWN = 10  # candidates in the table on the screen, unless --verbose


def tune(
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="ours, splash, tokamax, jax_flash or matmul.")
    ],
    shape: Annotated[
        str,
        typer.Option(
            metavar="B=1,Hq=8,Hkv=8,S=4096,D=128", help="Of matmul: M=1024,K=1024,N=1024."
        ),
    ],
    chip: Chip = "v6e",
    which: Annotated[
        str | None,
        typer.Option("--pass", metavar="PASS", help="forward (the default), backward or both."),
    ] = None,
    mask: Annotated[
        str | None, typer.Option(help="causal (the default), full or 'sliding_window(n)'.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (the default) or float32.")] = None,
    table: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Where the result goes; other entries of it are kept."),
    ] = Path("block_table.json"),
    candidates: Annotated[
        int | None, typer.Option(metavar="N", help="Try only the N most promising.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Begin no candidate after M minutes.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many to compile at a time; 2 where there are cores."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every candidate, and every reason.")
    ] = False,
) -> None:
    """Search a kernel's block sizes for the least cycles, and write the best to a table.

    The most promising come first: what the table has for such shapes, then the order of the grid.
    What does not fit in VMEM or does not compile is a miss, with its reason. Stopped and started
    again, the same command goes on: FILE.journal keeps what was found; delete that to search anew.
    An entry serves a class of shapes: see smalti.block_table.
    """
    from smalti import block_table
    from smalti.cli.tune_run import Search, journal_at, label_of, show, versions_now
    from smalti.cli.tune_subjects import Asked, grid_of
    from smalti.estimate.compile.target import find_target
    from smalti.estimate.tune import entry_of, merged
    from smalti.files import write_whole

    for option, number in (("--candidates", candidates), ("--jobs", jobs)):
        if number is not None and number < 1:
            raise ValueError(f"{option} {number}: at least 1")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes {minutes:g}: more than 0")
    find_target(chip)
    asked = Asked(shape, chip, which, mask, dtype)
    grid = grid_of(subject, asked)
    label = label_of(chip, which, dtype)
    before = block_table.find(  # a damaged table is found before the work, not after
        _entries(table), kernel=subject, chip=chip, shape_class=grid.shape_class
    )
    journal = journal_at(table)
    found = Search(subject, asked, chip).run(
        grid, journal, before=before, first=candidates, minutes=minutes, jobs=jobs
    )
    show(found, label, None if verbose else _SHOWN)
    if not found.ranked:
        reasons = list(dict.fromkeys(trial.reason for _, trial in found.missed))
        why = f"; the first reason: {reasons[0]}" if reasons else ""
        raise Failed(
            f"{_state(found)}: of {len(found.variants)} candidates {len(found.trials)} were tried, "
            f"and none gave an estimate{why}",
            130 if found.interrupted else 1,
        )
    entry = entry_of(
        found,
        kernel=subject,
        chip=chip,
        same=grid.shape_class.same,
        near=grid.shape_class.near,
        searched=grid.searched,
        label=label,
        versions=versions_now(),
        date=_today(),
        command=_command(subject, chip, grid.options),
    )
    # Read again: another search may have written to it meanwhile.
    text = block_table.dump(merged(_entries(table), entry))
    try:
        write_whole(table, text)
    except OSError as error:
        raise Failed(
            f"--table {table} could not be written ({error.strerror or error}); what was found is "
            f"in {journal.path}: the same command writes it again"
        ) from error
    wrote = f"{len(found.trials)} of {len(found.variants)} candidates are known; wrote {table}"
    if found.interrupted:
        raise Failed(f"stopped: {wrote}; the same command goes on from there", 130)
    print(f"{_state(found)}: {wrote}", file=sys.stderr)


def _state(found: Any) -> str:
    if found.interrupted:
        return "stopped"
    return "done" if len(found.trials) == len(found.variants) else "the budget is spent"


def _entries(table: Path) -> list[dict[str, Any]]:
    from smalti import block_table

    try:
        return block_table.load(table)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"--table {table} cannot be read: {error.strerror or error}") from error


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).date().isoformat()


def _command(subject: str, chip: str, options: tuple[str, ...]) -> str:
    """Budgets and files left out: those change what is done at a time, not what is found."""
    import shlex

    return shlex.join(["smalti", "estimate", "tune", subject, "--chip", chip, *options])
