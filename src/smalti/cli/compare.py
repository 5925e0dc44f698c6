"""`smalti estimate --diff a.json b.json`."""

from pathlib import Path


def compare_files(before: Path, after: Path) -> None:
    from smalti.cli.output import console
    from smalti.estimate.report import compare, read_record
    from smalti.estimate.report.tables import show_comparison

    compared = compare(read_record(before), read_record(after))
    out = console()
    for one in compared:
        show_comparison(out, one)
