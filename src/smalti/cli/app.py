"""The commands and their names. Nothing that takes time is imported here."""

from pathlib import Path
from typing import Annotated, Any

import typer

from smalti.cli.attention import attention
from smalti.cli.bench import bench
from smalti.cli.calibrate import calibrate
from smalti.cli.compare import compare_files
from smalti.cli.fn import fn
from smalti.cli.masks import show
from smalti.cli.sparse import sparse
from smalti.cli.tune import tune

_SETTINGS: dict[str, Any] = {
    "invoke_without_command": True,
    "rich_markup_mode": None,
    "add_completion": False,
}

app = typer.Typer(help="Attention for JAX that knows what a mask leaves out.", **_SETTINGS)
estimate = typer.Typer(**_SETTINGS)
app.add_typer(estimate, name="estimate")
masks = typer.Typer(**_SETTINGS)
app.add_typer(masks, name="masks")


@app.callback()
def _app(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@estimate.callback()
def _estimate(
    context: typer.Context,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--diff",
            metavar="A.json B.json",
            help="Compare two files that --json wrote: totals, then source lines.",
        ),
    ] = None,
) -> None:
    """A stopwatch without a TPU: what the real TPU compiler's schedule costs.

    Needs libtpu, the TPU compiler (pip install "smalti[tpu]"), and no TPU. Every number is an
    estimate, and says how far it can be trusted.
    """
    if diff is not None:
        if context.invoked_subcommand is not None:
            raise ValueError("--diff compares two files and takes no command")
        compare_files(*diff)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@masks.callback()
def _masks(context: typer.Context) -> None:
    """Which tiles of the score matrix a mask leaves alive."""
    if context.invoked_subcommand is None:
        print(context.get_help())


masks.command("show")(show)
estimate.command("attention")(attention)
estimate.command("fn")(fn)
estimate.command("tune")(tune)
estimate.command("bench")(bench)
estimate.command("sparse")(sparse)
estimate.command("calibrate")(calibrate)
