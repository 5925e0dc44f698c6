"""The real TPU compiler takes the kernels: ahead of time, without a TPU."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smalti.chips import TENSOR_CORES
from tests.support.libtpu import needs_libtpu

from .compile_for_tpu import CASES, CORE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    needs_libtpu,
]


# By chip; see CORE.
COMPILED = {chip: tuple(CASES) if chip == "v6e" else CORE for chip in TENSOR_CORES}


@functools.cache
def compiled(chip: str) -> dict[str, dict[str, str]]:
    """What the compiler made of each case. A process of its own for each chip: the compiler reads
    its settings once in a process, and may abort it."""
    cases = COMPILED[chip]
    done = subprocess.run(
        [sys.executable, "-m", "tests.preprocess.compile_for_tpu", chip, *cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    found = {result.pop("case"): result for result in results}
    lost = {"error": f"the compiler ended with {done.returncode}: {done.stderr[-2000:]}"}
    return {case: found.get(case, lost) for case in cases}


# Of these nothing is copied between the projections and the kernel.
NOT_COPIED = ("D128-bfloat16", "D128-float32", "interleaved")


@pytest.mark.parametrize(("chip", "case"), [(chip, x) for chip in COMPILED for x in COMPILED[chip]])
def test_forward_and_backward_compile(chip, case):
    found = compiled(chip)[case]
    assert "error" not in found, found["error"]
    hlo = found["hlo_forward"]
    assert kernels(hlo) == ["smalti_qk_norm_rope_forward"]
    assert kernels(found["hlo_backward"]) == ["smalti_qk_norm_rope_backward"]
    if case in NOT_COPIED:
        # The projections: the pattern does find operations.
        assert re.search(r"= \w+\[[\d,]+\]\S* convolution\(", hlo)
        # Not copy-start: that is a prefetch into VMEM, in the same layout. Nor one of a scalar.
        assert re.findall(r"= \w+\[[\d,]+\]\S* (?:copy|transpose)\(", hlo) == []


def kernels(hlo: str) -> list[str]:
    return re.findall(r'custom_call_target="tpu_custom_call".*?(smalti_\w+)', hlo)
