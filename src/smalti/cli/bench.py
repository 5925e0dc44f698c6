"""`smalti estimate bench`: our attention and its best peer, over shapes, passes and chips."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from smalti.cli.failing import STOPPED, Failed
from smalti.cli.options import RESULTS


def bench(
    chips: Annotated[str, typer.Option(metavar="CHIP,…")] = "v5e,v6e,v7x",
    dims: Annotated[str, typer.Option(metavar="D,…", help="Of 64, 128, 256.")] = "64,128,256",
    lengths: Annotated[str, typer.Option(metavar="S,…")] = "2048,4096,8192",
    kv_heads: Annotated[
        str, typer.Option(metavar="HKV,…", help="Key heads, for 8 query heads.")
    ] = "8,2",
    passes: Annotated[
        str, typer.Option(metavar="PASS,…", help="forward, and both in one program.")
    ] = "forward,both",
    variants: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only the N most promising variants of each peer."),
    ] = None,
    full_grid: Annotated[
        bool, typer.Option("--full-grid", help="Each peer's whole grid: many hours for all.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many to compile at a time; 2 where there are cores."),
    ] = None,
    json: Annotated[
        Path, typer.Option("--json", metavar="FILE|-", help="Everything; - to stdout.")
    ] = RESULTS / "bench-tpu-estimate.json",
    chart: Annotated[
        Path, typer.Option("--chart", metavar="FILE", help=".png, .svg or .pdf.")
    ] = RESULTS / "bench-tpu-estimate.png",
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What is known so far; bench.journal in the cache's folder."
        ),
    ] = None,
) -> None:
    """Ours and the best of tokamax's splash, jax's splash and jax's flash, for TPUs by estimate.

    bfloat16, causal, 8 query heads. Three hours on two cores; stopped at any moment and started
    again, it goes on, and what is known already shows. Results are kept by versions, flags, blocks
    and smalti's source: a change of our kernels measures ours anew, and no peer.
    """
    from smalti.cli import output
    from smalti.cli.bench_cases import Asked, tasks
    from smalti.cli.bench_record import record_of
    from smalti.cli.bench_run import prepare, run
    from smalti.cli.progress import Progress
    from smalti.cli.search import default_jobs
    from smalti.cli.tune_run import versions_now

    asked = Asked(
        chips=_words(chips),
        dims=_numbers("--dims", dims),
        lengths=_numbers("--lengths", lengths),
        kv_heads=_numbers("--kv-heads", kv_heads),
        passes=_words(passes),
        variants=variants,
        full_grid=full_grid,
    )
    known = prepare(json, chart, journal, jobs)
    from smalti.cli.bench_show import draw, show  # needs matplotlib, which `prepare` has looked for

    tasks(asked)  # says what is not installed before the work
    with Progress("programs") as progress:
        found = run(
            asked,
            known,
            jobs=jobs or default_jobs(),
            on_start=progress.start,
            on_done=progress.advance,
        )
    record = record_of(asked, found.trials, versions_now())
    output.write(record, json, chart, draw)
    if json != output.STDOUT:
        show(output.console(), record)
    print(f"{found.remembered} of {len(found.trials)} programs were known", file=sys.stderr)
    if found.interrupted:
        raise Failed(STOPPED, 130)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise ValueError(f"{option} {text!r} is not whole numbers joined by commas") from None
