"""The real TPU compiler takes the kernels, in the VMEM that we say, without a TPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from smalti.attention.tpu.block_sizes import MOST_OVERESTIMATE
from smalti.chips import TENSOR_CORES
from tests.support.libtpu import needs_libtpu

ROOT = Path(__file__).resolve().parents[3]
SLACK = 2**19  # bytes, which nothing hangs on; a kernel of one small tile takes almost none

pytestmark = [
    pytest.mark.slow,
    needs_libtpu,
]


@pytest.mark.parametrize("chip", TENSOR_CORES)
def test_the_compiler_takes_the_variants(chip):
    """One test for a chip: a process for each, since the compiler reads its settings once in a
    process, and may abort it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.tpu.compile_for_tpu", chip],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    results = {r["variant"]: r for r in map(json.loads, done.stdout.splitlines())}
    errors = {name: r["error"] for name, r in results.items() if "error" in r}
    assert errors == {}
    assert done.returncode == 0, f"the compiler ended after {list(results)}: {done.stderr[-2000:]}"
    kernels = [
        (name, kernel, found)
        for name, r in results.items()
        for kernel, found in r["kernels"].items()
    ]
    assert len(kernels) >= 2 * len(results) > 0
    below = [k for k in kernels if k[2]["estimate"] < k[2]["vmem"]]
    assert below == []
    above = [
        k
        for k in kernels
        if not k[2]["whole"] and k[2]["estimate"] > MOST_OVERESTIMATE * k[2]["vmem"] + SLACK
    ]
    assert above == []
    assert sum(not found["whole"] for *_, found in kernels) >= len(kernels) / 2
