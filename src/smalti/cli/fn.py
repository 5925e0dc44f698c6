"""`smalti estimate fn`: what any jittable function costs on a TPU."""

import traceback
from pathlib import Path
from typing import Annotated

import typer

from smalti.cli.failing import Failed
from smalti.cli.options import (
    Chart,
    Chip,
    Flags,
    Json,
    Source,
    Verbose,
    numbers_by_name,
    operands_by_kernel,
    split_flags,
)


def fn(
    function: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="Or package.module:FUNCTION.")
    ],
    args: Annotated[
        str | None,
        typer.Option(
            metavar="'bf16[8,128],f32[]'",
            help="Shapes of its arguments. Without it, the list FUNCTION_shapes in its file, or "
            "FUNCTION.shapes: a shape, or a pytree of shapes, for each argument.",
        ),
    ] = None,
    chip: Chip = "v6e",
    topology: Annotated[
        str | None,
        typer.Option(metavar="v6e:2x2", help="The slice; by default the chip's smallest."),
    ] = None,
    trip_count: Annotated[
        list[str] | None,
        typer.Option(metavar="while.3=12", help="How often a loop runs that depends on data."),
    ] = None,
    branch: Annotated[
        list[str] | None,
        typer.Option(metavar="conditional.1=0", help="Which branch of a conditional is taken."),
    ] = None,
    operand: Annotated[
        list[str] | None,
        typer.Option(
            metavar="kernel.1:0=0,1,2|FILE.npy",
            help="Values of a kernel's operand that decide its control flow, where the program "
            "computes them: whole numbers (int32), or a file of NumPy's.",
        ),
    ] = None,
    overlap: Annotated[
        str, typer.Option(help="What asynchronous copies overlap with: full or none.")
    ] = "full",
    longest: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only the N longest operations, the longest first."),
    ] = None,
    flags: Flags = "",
    json: Json = None,
    chart: Chart = None,
    source: Source = False,
    verbose: Verbose = False,
) -> None:
    """Compile a function for a TPU and show what it runs: operations, kernels, memory.

    \b
    smalti estimate fn model.py:step --args 'bf16[1,8,4096,128],f32[128]' --chip v6e
    """
    from smalti.cli import output
    from smalti.cli.function import load_function
    from smalti.estimate import EstimateError, Unstated, compile_for, estimate, trust
    from smalti.estimate.compile.target import find_target
    from smalti.estimate.report import entry, fn_record
    from smalti.estimate.report.tables import show_fn, show_source

    find_target(chip, topology)
    counts = numbers_by_name("--trip-count", trip_count or ())
    branches = numbers_by_name("--branch", branch or ())
    operands = operands_by_kernel(operand or ())
    if overlap not in ("full", "none"):
        raise ValueError(f"--overlap {overlap!r} is neither full nor none")
    if longest is not None and longest < 1:
        raise ValueError(f"--longest {longest}: at least 1")
    split = split_flags(flags)
    output.check(json, chart)
    loaded = load_function(function, args)
    try:
        program = compile_for(loaded.call, *loaded.args, chip=chip, topology=topology, flags=split)
    except (Failed, EstimateError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and _is_ours(error):
            raise
        # jax refuses what the function returned, say.
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        details = traceback.format_exc()
        raise Failed(f"{function}: {type(error).__name__}: {first}", details=details) from error
    try:
        result = estimate(
            program, overlap=overlap, trip_counts=counts, branches=branches, operands=operands
        )
    except Unstated as error:
        how = "--operand KERNEL:NUMBER=VALUES"
        if " State it: " in str(error):
            how = "--trip-count NAME=NUMBER for a loop, --branch NAME=NUMBER for a conditional"
        raise Unstated(f"{error} (here: {how})") from error
    record = fn_record(function, loaded.spelled, entry(result, label=trust(chip).label))
    output.write(record, json, chart)
    if json != output.STDOUT:
        out = output.console()
        show_fn(out, record, longest=longest, verbose=verbose)
        if source:
            show_source(out, function, record)


def _is_ours(error: Exception) -> bool:
    """Whether smalti found an argument wrong, and not jax something in the function."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return Path(__file__).parents[1] in raised_in.parents
