import subprocess
import sys

import pytest

from smalti.cli import app
from smalti.cli import main as package_main
from smalti.cli.failing import Failed
from smalti.estimate import CompileFailed
from smalti.estimate.report.record import record_text
from tests.estimate.report import records

assert package_main


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "estimate"),
        (("--help",), "estimate"),
        (("estimate",), "--diff"),
        (("estimate", "--help"), "attention"),
        (("estimate", "attention", "--help"), "--against"),
        (("estimate", "fn", "--help"), "--trip-count"),
    ],
)
def test_help(smalti, arguments, expected):
    run = smalti(*arguments)
    assert run.code == 0
    assert run.out.startswith("Usage: smalti")
    assert expected in run.out
    assert run.err == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("estmate",), r"No such command 'estmate'. Did you mean 'estimate'\? See: smalti --help"),
        (("estimate", "attnetion"), "Did you mean 'attention'"),
        (("estimate", "fn", "a.py:f", "--chp", "v6e"), "No such option: --chp .*--chip"),
        (("estimate", "fn"), "Missing argument 'FILE.py:FUNCTION'. See: smalti estimate fn --help"),
        (("estimate", "attention"), "Missing option '--shape'"),
        (("estimate", "attention", "--shape", "B=1", "--jobs", "x"), "Invalid value for '--jobs'"),
        (("estimate", "--diff", "a.json"), "Option '--diff' requires 2 arguments"),
        (("estimate", "--diff", "a", "b", "fn", "x.py:f"), "--diff compares two files and takes"),
    ],
)
def test_a_wrong_command_is_one_line(smalti, arguments, expected):
    import re

    run = smalti(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert re.search(expected, run.line), run.line


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("shape: it is\nwrong"), 2, "shape: it is wrong"),
        (CompileFailed("VMEM is exhausted", "the compiler's words"), 1, "VMEM is exhausted"),
        (Failed("no answer", details="Traceback"), 1, "no answer"),
        (KeyboardInterrupt(), 130, "stopped; what was compiled is kept"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(smalti, monkeypatch, error, code, said):
    def failing(*_):
        raise error

    monkeypatch.setattr(app, "compare_files", failing)
    run = smalti("estimate", "--diff", "a", "b")
    assert run.code == code
    assert said in run.err
    assert "Traceback" not in run.err
    assert "compiler's words" not in run.err


def test_verbose_shows_what_the_compiler_said(smalti, monkeypatch):
    from smalti.cli import output

    def failing(*_):
        raise CompileFailed("VMEM is exhausted", "the compiler's words")

    monkeypatch.setattr(output, "check", failing)
    run = smalti("estimate", "fn", "a.py:f", "--verbose")
    assert run.code == 1
    assert run.err == "the compiler's words\nsmalti: VMEM is exhausted\n"


def test_a_fault_of_ours_is_not_hidden(smalti, monkeypatch):
    monkeypatch.setattr(app, "compare_files", lambda *_: {}["missing"])
    with pytest.raises(KeyError):
        smalti("estimate", "--diff", "a", "b")


def in_a_process(code, *arguments, stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_typer_it_says_what_to_install():
    code = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'typer' else find(name, *a)\n"
        "from smalti.cli import main\n"
        "sys.exit(main(['--help']))"
    )
    done = in_a_process(code)
    assert done.returncode == 1
    assert done.stderr == (
        'smalti: the command line needs typer: pip install "smalti[cli]", or from a checkout '
        'pip install ".[cli]"\n'
    )


def test_help_waits_for_nothing():
    """Beyond `import smalti` itself, which needs jax, nothing large is imported for it."""
    code = (
        "import sys\n"
        "from smalti.cli import main\n"
        "main(['estimate', 'attention', '--help'])\n"
        "late = ('smalti.estimate.compile', 'smalti.estimate.peers', 'matplotlib', 'tokamax')\n"
        "print([name for name in late if name in sys.modules])"
    )
    assert in_a_process(code).stdout.splitlines()[-1] == "[]"


def test_python_m_and_a_reader_that_goes_away():
    done = in_a_shell("estimate --help | true; exit ${PIPESTATUS[0]}")
    assert done.returncode in (0, 141)  # whoever is quicker
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (">/dev/full", "smalti: the output cannot be written: No space left on device\n"),
        (">&-", "smalti: the output cannot be written: Bad file descriptor\n"),
    ],
)
@pytest.mark.parametrize(
    "command", ["masks show causal --q-len 64", "--help", "estimate --diff {0} {0}"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_takes_nothing_is_one_line(
    tmp_path, monkeypatch, unbuffered, command, where, said
):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    record = tmp_path / "a.json"
    record.write_text(record_text(records.fn()))
    done = in_a_shell(f"{command.format(record)} {where}")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_errors_that_nobody_can_read_keep_their_code(where):
    done = in_a_shell(f"masks show causl --q-len 64 {where}")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = in_a_shell(f"masks show causal --q-len 64 {where}")
    assert done.returncode == 0
    assert done.stdout.startswith("causal()")


def in_a_shell(command):
    return subprocess.run(
        f"{sys.executable} -m smalti.cli {command}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_file_that_fails_is_one_line(smalti, monkeypatch):
    def failing(*_):
        raise FileExistsError(17, "File exists", "bench-results")

    monkeypatch.setattr(app, "compare_files", failing)
    run = smalti("estimate", "--diff", "a", "b")
    assert run.code == 1
    assert run.line == "bench-results: File exists"


def test_a_command_in_capitals_is_suggested(smalti):
    assert "Did you mean 'masks'?" in smalti("MASKS").line


@pytest.mark.parametrize(
    "arguments",
    [
        ("masks", "show", "causal", "--q-len", 8, "--out", "a" * 300 + ".png"),
        ("estimate", "--diff", "a" * 300, "b"),
        ("estimate", "fn", "a" * 300 + ".py:f"),
        ("estimate", "fn", "a" * 300 + "/b.py:f"),
        ("estimate", "fn", "a:f", "--json", "a" * 300),
        ("estimate", "tune", "ours", "--shape", "B=1,Hq=1,Hkv=1,S=256,D=128", "--table", "a" * 300),
        ("estimate", "bench", "--journal", "a" * 300),
        ("estimate", "sparse", "--json", "a" * 300),
        ("estimate", "calibrate", "--json", "a" * 300),
    ],
)
def test_a_name_that_is_too_long_is_one_line(smalti, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = smalti(*arguments)
    assert run.code == 2
    assert "a" * 300 in run.line
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "bench-results"])
