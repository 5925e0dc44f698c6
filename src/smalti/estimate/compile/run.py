"""Run the compiler in a process of its own, and bring back all that it wrote."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti.estimate.compile.dumps import DUMP_FLAGS, find_kernels, find_xla_ops
from smalti.estimate.compile.failures import explain
from smalti.estimate.compile.target import Target
from smalti.estimate.errors import CompileFailed, DumpUnreadable, EstimateError
from smalti.estimate.program import KernelDump, Memory

# No scalar-prefetch operand prints longer: SMEM holds 1 MiB, an int8 prints as up to 6 characters.
_LONGEST_CONSTANT = 8 * 1024 * 1024


@dataclass(frozen=True)
class Compiled:
    hlo: str
    memory: Memory
    kernels: dict[str, KernelDump]
    xla_ops: dict[str, KernelDump]


def run_compiler(
    module: bytes,
    target: Target,
    flags: Sequence[str],
    timeout_s: float,
    versions: Mapping[str, str],
) -> Compiled:
    """Compile a lowered module. Raises what `failures.explain` makes of it if that fails."""
    try:
        with tempfile.TemporaryDirectory(prefix="smalti-") as name:
            folder = Path(name)
            request = {
                "topology": target.topology,
                "topology_devices": target.topology_devices,
                "device_kind": target.device_kind,
                "cores_per_device": target.cores_per_device,
                "devices": target.devices,
                "axes": target.axes,
            }
            (folder / "request.json").write_text(json.dumps(request))
            (folder / "module.mlirbc").write_bytes(module)
            (folder / "dumps").mkdir()
            returncode, stderr = _run_child(folder, flags, timeout_s, target)
            if returncode != 0:
                raise explain(target, versions, _failure(folder), stderr, returncode)
            return _read(folder)
    except OSError as error:
        raise EstimateError(
            f"the compiler's files could not be written or read below {tempfile.gettempdir()} "
            f"({error}); free some space, or point TMPDIR elsewhere"
        ) from error


def _run_child(
    folder: Path, flags: Sequence[str], timeout_s: float, target: Target
) -> tuple[int, str]:
    dumps = [flag.format(folder=folder / "dumps") for flag in DUMP_FLAGS]
    # Nothing of the user's settings but what was asked for: they would be in no cache key.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"JAX_|XLA_|LIBTPU_|TPU_", name)
    } | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join([*dumps, *flags]),
        # The child finds what this process finds, however it came to find it.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
    }
    with (folder / "stderr.txt").open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "smalti.estimate.compile.child"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
        )
        try:
            returncode = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CompileFailed(
                f"compiling for {target.chip} took longer than {timeout_s:g} s and was stopped; "
                "raise timeout_s, or compile less at once",
                _text(folder / "stderr.txt"),
            ) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.stdin.close()  # type: ignore[union-attr]
            child.wait()
    return returncode, _text(folder / "stderr.txt")


def _failure(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / "failed.json").read_text())
    except (OSError, ValueError):
        return {}


def _read(folder: Path) -> Compiled:
    try:
        memory = Memory(**json.loads((folder / "done.json").read_text()))
    except (OSError, ValueError) as error:
        raise DumpUnreadable(f"the compiler's results are incomplete: {error}") from error
    hlo = _with_constants(_text(folder / "hlo.txt"), _text(folder / "hlo_constants.txt"))
    kernels = find_kernels(_text(folder / "hlo_signatures.txt"), folder / "dumps")
    return Compiled(hlo, memory, kernels, find_xla_ops(kernels, folder / "dumps"))


def _with_constants(elided: str, whole: str) -> str:
    """The module with its constants, but the giant ones as `{...}`."""
    short, long = elided.splitlines(keepends=True), whole.splitlines(keepends=True)
    if len(short) != len(long):
        return whole
    pairs = zip(short, long, strict=True)
    return "".join(b if len(b) <= _LONGEST_CONSTANT else a for a, b in pairs)


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
