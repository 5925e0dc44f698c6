"""A run is a folder, runs/<name>/: config.yaml, metrics.jsonl, loss.png, sample.txt, checkpoints/,
and lock, which the process that writes there holds.

No run overwrites another: where runs/<name> exists, a new run becomes runs/<name>-2, and so on.
`--resume` goes on with the newest of them.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import yaml
from jax.experimental import multihost_utils

from nanogpt_jax.config import Config, UserError
from smalti.files import write_whole


class WriteError(Exception):
    """A file of the run cannot be written: `main` prints this one line and exits with code 1."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the system says against it (a full disk, most often) becomes a WriteError."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"cannot write {path}: {error.strerror or error}; nothing saved before is lost: make "
            "room there, and --resume goes on from the last checkpoint"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder against other processes; raises UserError when one has it already."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    with writing(folder / "lock"):
        file = (folder / "lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--resume: another process is training in {folder}; wait until it ends, or leave "
                "--resume out to start a run of its own"
            ) from None
        except OSError:  # some network file systems have no locks
            pass
        yield


def new_run(config: Config) -> Path:
    """Makes the folder, on all processes the same one."""
    folder, number = Path(config.run.dir) / config.run.name, 1
    if jax.process_index() == 0:
        while not _make(numbered(folder, number)):
            number += 1
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(number))
    return numbered(folder, number)


def _make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(
            f"run.dir: cannot make the folder {folder}: {error.strerror}; set run.dir to a folder "
            "that can be written"
        ) from None
    return True


def latest_run(config: Config) -> Path:
    """The newest of runs/<name>, runs/<name>-2, …; raises UserError when there is none.

    Another run may have such a name of its own: of the numbered ones, those count that say in
    their config.yaml to be of this name. A folder without that file never began.
    """
    folder = Path(config.run.dir) / config.run.name
    pattern = re.compile(re.escape(folder.name) + r"(?:-([1-9]\d*))?")
    matches = ((p, pattern.fullmatch(p.name)) for p in folder.parent.glob("*") if p.is_dir())
    numbers = [
        int(match[1] or 1)
        for path, match in matches
        if match and (path / "config.yaml").is_file()
        if match[1] is None or _name_inside(path) == folder.name
    ]
    if not numbers:
        raise UserError(
            f"--resume: no run {folder} to go on with; leave --resume out to start it, or set "
            "run.name and run.dir to those of the run"
        )
    return numbered(folder, max(numbers))


def _name_inside(folder: Path) -> str | None:
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return values["run"]["name"]
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
        return None


def numbered(folder: Path, number: int) -> Path:
    return folder if number == 1 else folder.with_name(f"{folder.name}-{number}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    with writing(path):
        write_whole(path, text)
