"""The real TPU compiler takes the kernels, and copies no cache for them: ahead of time, without a
TPU."""

import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.libtpu import needs_libtpu

from .compile_for_tpu import COMPILED, VARIANTS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, needs_libtpu]


@functools.cache
def compiled(chip: str) -> dict[str, dict[str, str]]:
    """What the compiler made of each variant. A process of its own for each chip: the compiler
    reads its settings once in a process, and may abort it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.decode.compile_for_tpu", chip],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    found = {r.pop("variant"): r for r in map(json.loads, done.stdout.splitlines())}
    lost = {"error": f"the compiler ended with {done.returncode}: {done.stderr[-2000:]}"}
    return {name: found.get(name, lost) for name in COMPILED[chip]}


@pytest.mark.parametrize(("chip", "name"), [(chip, x) for chip in COMPILED for x in COMPILED[chip]])
def test_a_step_compiles_to_two_kernels_and_no_copy_of_the_cache(chip, name):
    found = compiled(chip)[name]
    assert "error" not in found, found["error"]
    hlo, variant = found["hlo"], VARIANTS[name]
    kernels = re.findall(r'custom_call_target="tpu_custom_call".*?(smalti_\w+)', hlo)
    assert kernels == ["smalti_decode", "smalti_decode_write"]
    smallest = (variant.sinks + variant.window) * min(variant.D, variant.Dv or variant.D)
    smallest *= variant.B * variant.Hkv // variant.devices
    moved = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose|scatter)\(", hlo)
    assert moved  # the pattern does find operations
    sizes = [math.prod(map(int, shape.split(","))) for shape in moved]
    if smallest > 2**18:
        assert max(sizes) < smallest
