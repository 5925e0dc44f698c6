"""What the compiler says when it fails, put into one line that names what to do."""

import re
import signal
from collections.abc import Mapping

from smalti.estimate.compile.target import Target
from smalti.estimate.errors import CompileFailed, CompilerMissing, EstimateError

TESTED = "jax 0.10.2 with libtpu 0.0.42.1, and jax 0.12.0.1 with libtpu 0.0.50.1"
_PLACE = re.compile(r'"([^"\n]+)":(\d+):(\d+)')


def explain(
    target: Target,
    versions: Mapping[str, str],
    failed: Mapping[str, str],
    stderr: str,
    returncode: int,
) -> Exception:
    """The exception to raise for a child that failed.

    `failed` is what it wrote of the failure: `stage`, `type` and `text` of the exception; empty
    where it died without a word.
    """
    stage, text = failed.get("stage", ""), failed.get("text", "")
    libtpu = versions["libtpu"]
    printed = f"{text}\n{stderr}".strip()
    if "No space left on device" in printed:
        return EstimateError(
            "the disk is full, so the compiler could not write its dumps; free some space, or "
            "point TMPDIR to a folder on another disk"
        )
    if match := re.search(r"ERROR: Unknown command line flag '(\S+)'", stderr):
        return ValueError(
            f"flags holds --{match[1]}, which libtpu {libtpu} does not know; correct it or leave "
            "it out"
        )
    if match := re.search(r"ERROR: Illegal value '(.*)' specified for flag '(\S+)'", stderr):
        return ValueError(
            f"flags gives --{match[2]} the value {match[1]!r}, which libtpu {libtpu} refuses"
        )
    by_compiler = failed.get("type") in ("JaxRuntimeError", "MosaicError")
    if stage == "topology" and by_compiler:
        return _topology_failure(target, libtpu, text, printed)
    if stage == "compile" and by_compiler:
        return CompileFailed(_compile_failure(target, text), printed)
    if stage:
        return CompileFailed(
            f"jax {versions['jax']} with libtpu {libtpu} does not work as the tested versions do "
            f"({stage}: {failed.get('type')}: {_first_line(text)}); tested are {TESTED}",
            printed,
        )
    why = _last_words(stderr)
    if returncode < 0:
        return CompileFailed(
            f"the compiler died of {_signal_name(-returncode)} while compiling for {target.chip}"
            f"{f' ({why})' if why else ''}; "
            + (
                "something stopped it, mostly a machine that ran out of memory: free some"
                if -returncode == signal.SIGKILL
                else f"that is a fault of libtpu {libtpu}, which some gathers in kernels set off: "
                "leave parts of the function out until it compiles, and write that part another way"
            ),
            printed,
        )
    return CompileFailed(
        f"the compiling process ended with status {returncode}: {why or _last_line(stderr)}",
        printed,
    )


def _topology_failure(target: Target, libtpu: str, text: str, printed: str) -> Exception:
    if "Failed to open" in text or "cannot open shared object" in text or "ELF" in text:
        return CompilerMissing(
            f"libtpu {libtpu} is installed but does not load here ({_first_line(text)}); it is "
            'built for Linux on x86-64: reinstall it there with pip install "jax[tpu]"'
        )
    if "INVALID_ARGUMENT" in text:
        return ValueError(
            f"libtpu {libtpu} refuses the topology {target.topology} ({_first_line(text)}); a "
            "slice is made of whole hosts, mostly of 2x2 chips: try 2x2, 2x4, 4x4 or 8x8 (v4, v5p "
            "and v7x: 2x2x1, 2x2x2 or 4x4x4)"
        )
    return CompileFailed(
        f"libtpu {libtpu} does not describe {target.topology} as expected: {_first_line(text)}",
        printed,
    )


def _compile_failure(target: Target, text: str) -> str:
    kernel = re.search(r"%?([\w.\-]+) = \S+ custom-call\(", text)
    of = f" of {kernel[1]}" if kernel else ""
    if match := re.search(r"size ([\d.]+[KMG]?) and limit ([\d.]+[KMG]?) exceeded scoped v", text):
        needed, limit = match.groups()
        return (
            f"VMEM{of} is exhausted on {target.chip}: the kernel needs {needed} and its limit is "
            f"{limit}; take smaller blocks, or raise the limit with "
            f"flags=('--xla_tpu_scoped_vmem_limit_kib={_kib(needed)}',) if the chip has that much"
        )
    if match := re.search(r"memory space (vmem|smem)\. Used ([\d.]+\w?) of ([\d.]+\w?)", text):
        space, needed, limit = match.groups()
        return (
            f"{space.upper()}{of} is exhausted on {target.chip}: {needed} are needed and the chip "
            f"has {limit}; take smaller blocks or scratch"
        )
    if match := re.search(
        r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=(\w+)(.*)", text
    ):
        needed, limit, space, rest = match.groups()
        tag = re.search(r"tag = '([^']*)'", rest)
        owner = re.search(r":: ([\w.\-]+)\s*$", rest, re.M)
        return (
            f"{space.upper()}{f' of {owner[1]}' if owner else ''} is exhausted on {target.chip}: "
            f"{f'{tag[1]} needs ' if tag else ''}{needed} bytes and there are {limit}; pass a "
            "smaller array there"
        )
    if "Ran out of memory" in text and re.search(r"\bhbm\b", text, re.I):
        sizes = re.search(r"Used ([\d.]+\w?) of ([\d.]+\w?)", text) or re.search(
            r"\(([\d.]+\w?)\) exceeds available HBM \(([\d.]+\w?)\)", text
        )
        needed = f": {sizes[1]} are needed and {sizes[2]} are there" if sizes else ""
        return (
            f"HBM of {target.chip} is exhausted{needed}; take a smaller batch, recompute with "
            "jax.checkpoint, donate arguments, or spread it over more chips"
        )
    if match := re.search(
        r"Mosaic failed to compile TPU kernel(?: with .*HLO name `(.+?)`)?: (.*)", text
    ):
        name, why = match.groups()
        place = _PLACE.search(text)
        where = f" at {place[1]}, line {place[2]}" if place else ""
        return (
            f"Mosaic, the compiler of Pallas kernels, refuses {name or 'a kernel'} on "
            f"{target.chip}{where}: {why.strip()}; write that part of the kernel another way"
        )
    return f"the compiler refuses the program on {target.chip}: {_first_line(text)}"


def _kib(size: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([KMG]?)", size).groups()  # type: ignore[union-attr]
    kib = float(number) * {"": 1 / 1024, "K": 1, "M": 1024, "G": 1024**2}[unit]
    return -int(-kib // 1)  # up


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _last_words(stderr: str) -> str:
    """The line in which a dying process says why, without its time stamp; "" if it does not."""
    match = re.search(
        r"(?:^F\d{4}.*?\] |LLVM ERROR: |Check failed: |Fatal .*?error: ).*", stderr, re.M
    )
    return re.sub(r"^F\d{4}.*?\] ", "", match[0]).strip() if match else ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
