"""The child process, with a script in place of Python and the compiler."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from smalti.estimate.compile import run
from smalti.estimate.compile.run import run_compiler
from smalti.estimate.errors import CompileFailed, DumpUnreadable, EstimateError

from .kernels import v6e

VERSIONS = {"jax": "0.10.2", "libtpu": "0.0.42.1"}


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Sets what the child does, and returns what running it gives; it runs in a folder of its own,
    all of which is gone afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(run.tempfile, "tempdir", str(folder))

    def runs(script: str, timeout_s: float = 60, flags=()):
        program = tmp_path / "child"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(run.sys, "executable", str(program))
        try:
            return run_compiler(b"module", v6e(), flags, timeout_s, VERSIONS)
        finally:
            assert list(folder.iterdir()) == []

    return runs


DONE = (
    'echo \'{"arguments_bytes": 1, "outputs_bytes": 2, "aliased_bytes": 0, "temporaries_bytes": 3, '
    '"code_bytes": 4}\' > done.json; '
)
TEXTS = 'for kind in "" _constants _signatures; do echo "HloModule m" > hlo$kind.txt; done; '


def test_results_come_back(child):
    compiled = child(TEXTS + DONE)
    assert compiled.hlo == "HloModule m\n"
    assert compiled.memory.peak_bytes == 10
    assert compiled.kernels == {}


def test_the_child_gets_the_flags_and_none_of_the_users_settings(child, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--users")
    monkeypatch.setenv("XLA_FLAGS", "--users")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    hlo = child(TEXTS + "env > hlo_constants.txt; env > hlo.txt; " + DONE, flags=("--a=1",)).hlo
    settings = dict(line.split("=", 1) for line in hlo.splitlines() if "=" in line)
    assert settings["LIBTPU_INIT_ARGS"].endswith(
        "/dumps --xla_jf_dump_llo_text=true"
        " --xla_jf_dump_llo_pass_label_regex=^final_"
        " --xla_mosaic_enable_llo_source_annotations=true --a=1"
    )
    assert settings["JAX_PLATFORMS"] == "cpu"
    assert settings.keys().isdisjoint({"XLA_FLAGS", "JAX_ENABLE_X64"})


def test_constants_are_whole_but_for_giant_ones(child, monkeypatch):
    monkeypatch.setattr(run, "_LONGEST_CONSTANT", 30)
    hlo = child(
        TEXTS
        + 'printf "a = constant({...})\\nb = constant({...})\\n" > hlo.txt; '
        + 'printf "a = constant({1, 2})\\nb = constant({1, 2, 3, 4, 5, 6, 7})\\n" '
        + "> hlo_constants.txt; "
        + DONE
    ).hlo
    assert hlo == "a = constant({1, 2})\nb = constant({...})\n"


def test_a_compiler_that_aborts(child):
    with pytest.raises(CompileFailed, match=r"^the compiler died of SIGABRT while .*\(Check fai"):
        child('echo "Check failed: a == b" >&2; kill -ABRT $$')


def test_a_compiler_that_takes_too_long_is_stopped(child, tmp_path):
    with pytest.raises(CompileFailed) as caught:
        child(f"echo $$ > {tmp_path}/pid; echo half-way; exec sleep 60", timeout_s=0.5)
    assert str(caught.value) == (
        "compiling for v6e took longer than 0.5 s and was stopped; raise timeout_s, or compile "
        "less at once"
    )
    assert caught.value.compiler_message == "half-way\n"
    assert_ended(tmp_path / "pid")


def test_control_c_ends_the_child(child, tmp_path, monkeypatch):
    waiting = threading.Event()

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    def press():
        # While it is being started, what ends it is its closed input: the tests below.
        waiting.wait()
        while not pid.exists() or not pid.read_text().strip():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    pid = tmp_path / "pid"
    monkeypatch.setattr(subprocess, "Popen", Popen)
    # A process in the background of a script ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            child(f"echo $$ > {pid}; exec sleep 60")
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert_ended(pid)


def assert_ended(pid: Path):
    """Within a second: the system takes a moment."""
    for _ in range(100):
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the child still runs")


def test_the_child_ends_with_its_parent():
    waits = "from smalti.estimate.compile import child; child._end_with_parent()"
    process = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert process.stdin is not None
    process.stdin.close()  # as when the parent dies
    assert process.wait(60) == 1


def test_results_that_are_cut_short(child):
    with pytest.raises(DumpUnreadable, match=r"^the compiler's results are incomplete: "):
        child(TEXTS + 'echo "{" > done.json')


def test_no_room_for_the_files(child, monkeypatch):
    monkeypatch.setattr(run.tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(EstimateError, match=r"below /proc/nowhere .*point TMPDIR elsewhere$"):
        run_compiler(b"module", v6e(), (), 60, VERSIONS)
