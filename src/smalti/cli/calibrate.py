"""`smalti estimate calibrate`: every published time that names a kernel, predicted."""

from typing import Annotated

import typer

from smalti.cli.options import Json


def calibrate(
    json: Json = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Keep the errors as the label of every later estimate."),
    ] = False,
) -> None:
    """Predict published kernel times, and show by how much the predictions are off.

    A quarter of an hour the first time: some forty programs are compiled, and kept. The rows of
    tokamax need pip install tokamax, which the extra "bench" has.
    """
    from smalti.cli import output
    from smalti.cli.progress import Progress
    from smalti.estimate.calibrate import calibrate as run
    from smalti.estimate.calibrate.rows import published
    from smalti.estimate.trust import write_errors

    output.check(json, None)
    with Progress("rows") as progress:
        progress.start(sum(row.names_a_kernel for row in published()))
        result = run(progress.advance)
    if write:
        write_errors(result.rows, result.versions)
    if json != output.STDOUT:
        _show(result)
    if json is not None:
        output.write(result.to_json(), json, None)


def _short(variant: str) -> str:
    """ "tokamax block_q=1024 block_kv=1024 …" → "tokamax 1024/1024/…"."""
    name, *blocks = variant.split()
    sizes = [value for _, _, value in (block.partition("=") for block in blocks)]
    return f"{name} {'/'.join(size for size in sizes if size.isdecimal())}".strip()


def _show(result) -> None:
    from rich.table import Table

    from smalti.cli.output import console

    table = Table(title="Published times, predicted (estimates)")
    for name in ("row", "published µs", "predicted µs", "error", "left out", "what stands for it"):
        text = name in ("row", "what stands for it")
        table.add_column(name, justify="left" if text else "right", no_wrap=name == "row")
    for row in result.rows:
        table.add_row(
            row.id,
            f"{row.published_s * 1e6:,.1f}",
            f"{row.predicted_s * 1e6:,.1f}",
            f"{row.error:+.1%}" + ("*" if row.carried_by_dispatch else ""),
            f"{row.left_out_error:+.1%}",
            _short(row.variant),
        )
    out = console()
    out.print(table)
    out.print(
        "error: with the constants of chips.py; left out: with constants fitted on all other rows."
        "\n*: carried by the dispatch from the host, so it says nothing about the kernel and is in "
        "no figure below."
    )
    for row, why in result.not_predicted.items():
        out.print(f"not predicted: {row}: {why}")
    for a, b in result.wrong_orders:
        out.print(f"order predicted wrongly: {a} and {b}")
    out.print(
        f"published.json: median absolute error {result.median_abs_error:.1%} (left out "
        f"{result.median_abs_left_out_error:.1%}), worst {result.worst_abs_error:.1%}"
    )
    tuned = result.to_json()
    if tuned["tuned_median_abs_error"] is not None:
        out.print(
            f"tuned.json: median absolute error {tuned['tuned_median_abs_error']:.1%}, worst "
            f"{tuned['tuned_worst_abs_error']:.1%}"
        )
    fitted = tuned["constants"]
    out.print(
        "fitted constants: "
        + ", ".join(f"{name} {value:.6g}" for name, value in fitted.items())
        + "; a fit on all rows gives now: "
        + ", ".join(f"{name} {value:.6g}" for name, value in tuned["fitted_now"].items())
    )
    out.print("with " + ", ".join(f"{name} {v}" for name, v in result.versions.items()))
