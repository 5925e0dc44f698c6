"""Where results go: tables to stdout, JSON and a chart to files; checked before the long work."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from smalti.cli.failing import Failed
from smalti.files import write_whole

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
        check_picture("--chart", chart, CHART_SUFFIXES)


def check_picture(option: str, path: Path, suffixes: tuple[str, ...]) -> None:
    """Raises ValueError for a file that cannot be written, Failed without matplotlib."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(
            f"{option} {path}: the name ends in {' or '.join(suffixes)}, which chooses the format"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise Failed(f'{option} needs matplotlib: pip install "smalti[cli]"')
    _check_writable(option, path)


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
        write_file(json, lambda: write_whole(json, record_text(record)))
    if chart is not None:
        if draw is None:
            from smalti.estimate.report.chart import draw

        write_file(chart, lambda: draw(record, chart))


def write_file(path: Path, writing: Callable[[], Any]) -> None:
    """Says where it went on stderr; raises Failed if it went nowhere."""
    try:
        writing()
    except OSError as error:
        raise Failed(f"{path} could not be written: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _check_writable(option: str, path: Path) -> None:
    try:
        target = Path(os.path.realpath(path))  # of a link to nowhere the link stays
        if target.is_fifo():
            return  # opened and closed, it would have ended for who reads it
        existed = target.exists()
        target.open("ab").close()
        if not existed:
            target.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror or error}; give another file"
        ) from error
