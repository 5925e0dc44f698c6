"""Options that several commands have, and what their texts mean."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

Chip = Annotated[str, typer.Option("--chip", help="v4, v5e, v5p, v6e or v7x.", metavar="CHIP")]
Flags = Annotated[
    str,
    typer.Option(
        "--flags",
        metavar="'--xla_tpu_scoped_vmem_limit_kib=65536 …'",
        help="Flags of libtpu, separated by spaces.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE|-", help="Write everything as JSON; - to stdout."),
]
Chart = Annotated[
    Path | None,
    typer.Option("--chart", metavar="FILE", help="Draw time and occupancy: .png, .svg or .pdf."),
]
Source = Annotated[
    bool,
    typer.Option(
        "--source",
        help="Show the kernels' source lines, with the cycles, empty bundles and spills each owns.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show every reason in full, and the compiler's messages.")
]


def split_flags(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"--flags {text!r} cannot be split into flags: {error}") from error


def numbers_by_name(option: str, texts: Iterable[str]) -> dict[str, int]:
    """`["while.3=12"]` as `{"while.3": 12}`. Raises ValueError for any other form."""
    found: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"%?(\S+?)=(\d+)", text.strip())
        if match is None:
            raise ValueError(f"{option} {text!r} is not NAME=NUMBER, as in {option} while.3=12")
        if match[1] in found:
            raise ValueError(f"{option}: {match[1]} is given twice")
        found[match[1]] = int(match[2])
    return found
