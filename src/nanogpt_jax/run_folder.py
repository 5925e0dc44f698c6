"""A run is a folder, runs/<name>/: config.yaml, metrics.jsonl, loss.png, sample.txt, checkpoints/.

No run overwrites another: where runs/<name> exists, a new run becomes runs/<name>-2, and so on.
`--resume` goes on with the newest of them.
"""

import os
import re
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from nanogpt_jax.config import Config, UserError


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
    """The newest of runs/<name>, runs/<name>-2, …; raises UserError when there is none."""
    folder = Path(config.run.dir) / config.run.name
    pattern = re.compile(re.escape(folder.name) + r"(?:-(\d+))?")
    matches = ((p, pattern.fullmatch(p.name)) for p in folder.parent.glob("*") if p.is_dir())
    numbers = [int(match[1] or 1) for _, match in matches if match]
    if not numbers:
        raise UserError(
            f"--resume: no run {folder} to go on with; leave --resume out to start it, or set "
            "run.name and run.dir to those of the run"
        )
    return numbered(folder, max(numbers))


def numbered(folder: Path, number: int) -> Path:
    return folder if number == 1 else folder.with_name(f"{folder.name}-{number}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
