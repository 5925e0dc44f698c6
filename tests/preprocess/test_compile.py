"""The real TPU compiler takes the kernels: ahead of time, without a TPU."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .compile_for_tpu import CASES

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, is not installed: pip install 'smalti[tpu]'",
    ),
]


@pytest.fixture(scope="module", params=["v5e", "v6e"])
def compiled(request) -> dict[str, dict[str, str]]:
    """What the compiler made of each case. A process of its own for each chip: the compiler reads
    its settings once in a process, and may abort it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.preprocess.compile_for_tpu", request.param],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    found = {result.pop("case"): result for result in results}
    lost = {"error": f"the compiler ended with {done.returncode}: {done.stderr[-2000:]}"}
    return {case: found.get(case, lost) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_compile(compiled, case):
    assert "error" not in compiled[case], compiled[case]["error"]
    assert kernels(compiled[case]["hlo_forward"]) == ["smalti_qk_norm_rope_forward"]
    assert kernels(compiled[case]["hlo_backward"]) == ["smalti_qk_norm_rope_backward"]


@pytest.mark.parametrize("case", ["D128-bfloat16", "D128-float32"])
def test_nothing_is_copied_between_the_projections_and_the_kernel(compiled, case):
    hlo = compiled[case]["hlo_forward"]
    assert re.search(r" convolution\(", hlo)  # the projections: the pattern does find operations
    # Not copy-start: that is a prefetch into VMEM, in the same layout.
    assert re.findall(r" (?:copy|transpose)\(", hlo) == []


def kernels(hlo: str) -> list[str]:
    return re.findall(r'custom_call_target="tpu_custom_call".*?(smalti_\w+)', hlo)
