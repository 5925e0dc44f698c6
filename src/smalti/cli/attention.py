"""`smalti estimate attention`: the same attention by every peer, side by side."""

import dataclasses
import difflib
import sys
from typing import Annotated

import typer

from smalti.cli.options import Chart, Chip, Flags, Json, Source, Verbose, split_flags


def attention(
    shape: Annotated[
        str, typer.Option(metavar="B=1,Hq=8,Hkv=8,S=4096,D=128", help="Sq and Sk may differ.")
    ],
    chip: Chip = "v6e",
    mask: Annotated[str, typer.Option(help="causal, full or 'sliding_window(n)'.")] = "causal",
    which: Annotated[
        str,
        typer.Option("--pass", metavar="PASS", help="forward, backward, or both in one program."),
    ] = "forward",
    against: Annotated[
        str, typer.Option(metavar="PEER,…", help="Of tokamax, splash, jax_flash and xla.")
    ] = "tokamax,splash,jax_flash,xla",
    layout: Annotated[str, typer.Option(help="BHSD or BSHD.")] = "BHSD",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    variants: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only the N most promising variants of each peer."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many to compile at a time; 2 where there are cores."),
    ] = None,
    flags: Flags = "",
    json: Json = None,
    chart: Chart = None,
    source: Source = False,
    verbose: Verbose = False,
) -> None:
    """Compile every variant of each peer for a TPU, estimate it, and show the best of each.

    What was compiled is kept: the same command, stopped and started again, goes on.
    """
    from smalti.cli import output
    from smalti.cli.progress import Progress
    from smalti.cli.search import OURS, Subject, default_jobs, search
    from smalti.estimate import trust
    from smalti.estimate.compile.target import find_target
    from smalti.estimate.peers import ATTENTION_PEERS, PASSES, AttentionCase
    from smalti.estimate.report import attention_record
    from smalti.estimate.report.tables import show_attention, show_source

    case = AttentionCase.parse(shape, mask=mask, layout=layout, dtype=dtype)
    _check("--pass", which, PASSES)
    peers = list(dict.fromkeys(name.strip() for name in against.split(",")))
    for name in peers:
        _check("--against", name, ATTENTION_PEERS)
    for option, number in (("--variants", variants), ("--jobs", jobs)):
        if number is not None and number < 1:
            raise ValueError(f"{option} {number}: at least 1")
    find_target(chip)
    output.check(json, chart)
    subject = Subject(case, which, chip, split_flags(flags), trust(chip, which, case.dtype).label)
    with Progress() as progress:
        found = search(
            subject,
            [*peers, OURS],
            most=variants,
            jobs=jobs or default_jobs(),
            on_start=progress.start,
            on_done=progress.advance,
        )
    record = attention_record(
        dataclasses.asdict(case),
        which,
        chip,
        subject.label,
        ours=found[OURS].best,
        peers={name: found[name].best for name in peers},
        reasons={name: one.reason for name, one in found.items() if one.reason},
        tried={name: one.tried or [] for name, one in found.items()},
    )
    output.write(record, json, chart)
    if json != output.STDOUT:
        out = output.console()
        show_attention(out, record, verbose=verbose)
        if source:
            for name, one in found.items():
                if one.best is not None:
                    show_source(out, name, one.best)
    if not any(one.best for one in found.values()):
        print("smalti: no variant gave an estimate", file=sys.stderr)
        raise typer.Exit(1)


def _check(option: str, got: str, allowed: tuple[str, ...]) -> None:
    if got in allowed:
        return
    near = difflib.get_close_matches(got.lower(), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{option}: {got!r} is none of {', '.join(allowed)}{hint}")
