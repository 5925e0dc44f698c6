"""Lowering here and compiling there gives what jax gives when it does both over real devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smalti.estimate.compile import compile_for
from smalti.estimate.compile.dumps import DUMP_FLAGS
from tests.support.libtpu import needs_libtpu

from .compile_directly import CASES

ROOT = Path(__file__).resolve().parents[3]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_program_and_its_bundles_are_the_same(tmp_path, case):
    flags = " ".join(flag.format(folder=tmp_path / "dumps") for flag in DUMP_FLAGS)
    (tmp_path / "dumps").mkdir()
    direct = subprocess.run(
        [sys.executable, "-m", "tests.estimate.compile.compile_directly", case],
        cwd=ROOT,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": flags,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    fn, args = CASES[case]
    program = compile_for(fn, *args, chip="v6e", cache_dir=tmp_path)

    assert without_places(program.hlo) == without_places(direct)
    assert program.kernels
    for op, kernel in program.kernels.items():
        (bundles,) = (tmp_path / "dumps").glob(f"*-{op}-[0-9][0-9]-final_bundles.txt")
        assert without_locations(bundles.read_text()) == without_locations(kernel.bundles)


def without_locations(bundles: str) -> str:
    """jax's own are those of the first like operation."""
    assert 'loc("' in bundles
    return re.sub(r'loc\("[^"]*":[\d:]+( to [\d:]+)?\)', "", bundles)


def without_places(hlo: str) -> list[str]:
    """Source locations, which differ in the frames around a call, also within a kernel's body, and
    constants, which `as_text` elides, left out."""
    instructions = [
        line for line in hlo.splitlines() if re.match(r"\s*(ROOT )?%|ENTRY|HloMod", line)
    ]
    return [
        re.sub(r'stack_frame_id=\d+|"(body|debug_locations)":"[^"]*"|constant\(\{.*?\}\)', "", line)
        for line in instructions
    ]
