"""Options that several commands have, and what their texts mean."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

RESULTS = Path("bench-results")  # where comparisons go unless told; git ignores it
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


def operands_by_kernel(texts: Iterable[str]) -> dict[str, dict[int, Any]]:
    """`["gather.1:0=2,0,1"]` as `{"gather.1": {0: array([2, 0, 1])}}`; values may be a .npy file.

    Raises ValueError for any other form, and for a file that cannot be read.
    """
    import numpy as np

    found: dict[str, dict[int, Any]] = {}
    for text in texts:
        match = re.fullmatch(r"%?(\S+):(\d+)=(\S+)", text.strip())
        if match is None:
            raise ValueError(
                f"--operand {text!r} is not KERNEL:NUMBER=VALUES, as in --operand kernel.1:0=0,1,2 "
                "or kernel.1:0=table.npy"
            )
        kernel, number, values = match[1], int(match[2]), match[3]
        if values.endswith(".npy"):
            try:
                array = np.load(values, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise ValueError(f"--operand {text!r}: {values} cannot be read: {error}") from error
        else:
            try:
                array = np.array([int(value) for value in values.split(",")], np.int32)
            except (ValueError, OverflowError):
                raise ValueError(
                    f"--operand {text!r}: {values!r} is neither whole numbers of 32 bits, joined "
                    "by commas, nor a .npy file"
                ) from None
        if number in found.setdefault(kernel, {}):
            raise ValueError(f"--operand: operand {number} of {kernel} is given twice")
        found[kernel][number] = array
    return found
