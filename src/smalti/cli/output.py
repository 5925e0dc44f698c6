"""Where results go: tables to stdout, JSON and a chart to files; checked before the long work."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from smalti.cli.failing import Failed

STDOUT = Path("-")
CHART_SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH = 120  # of what is not a terminal


def console() -> Console:
    """For tables."""
    out = Console(highlight=False, emoji=False)
    return out if out.is_terminal else Console(highlight=False, emoji=False, width=_WIDTH)


def check(json: Path | None, chart: Path | None) -> None:
    """Raises ValueError for a file that cannot be written, Failed without matplotlib."""
    if json is not None and json != STDOUT:
        _check_writable("--json", json)
    if chart is not None:
        if chart.suffix.lower() not in CHART_SUFFIXES:
            raise ValueError(
                f"--chart {chart}: the name ends in {' or '.join(CHART_SUFFIXES)}, which chooses "
                "the format"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise Failed('--chart needs matplotlib: pip install "smalti[cli]"')
        _check_writable("--chart", chart)


def write(
    record: Mapping[str, Any],
    json: Path | None,
    chart: Path | None,
    draw: Callable[[Any, Path], None] | None = None,
) -> None:
    """What was asked for in files; says where it went on stderr.

    draw: the chart of a record that `smalti.estimate.report` does not know.
    """
    from smalti.estimate.report import record_text

    if json == STDOUT:
        sys.stdout.write(record_text(record))
    elif json is not None:
        _write(json, lambda: json.write_text(record_text(record), encoding="utf-8"))
    if chart is not None:
        if draw is None:
            from smalti.estimate.report.chart import draw

        _write(chart, lambda: draw(record, chart))


def _write(path: Path, writing) -> None:
    try:
        writing()
    except OSError as error:
        raise Failed(f"{path} could not be written: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _check_writable(option: str, path: Path) -> None:
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error
    if not existed:
        path.unlink()
