"""Files that are replaced, so that a result is never lost to a process that ends as it writes."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, content: str | bytes) -> None:
    """The file has the old content or the new one, at any moment. Raises OSError.

    Written beside it and put in its place; where it is a link, in that of what the link leads to.
    What is no file to be replaced, such as a pipe or a device, is written to, and so is a file in a
    folder that takes no other.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    try:
        # Of no name of its own: with more to it, that of the file could be too long.
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".smalti-", suffix=".part")
    except PermissionError:
        path.write_bytes(data)
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, _mode(path))
        try:
            os.replace(part, path)
        except OSError as error:
            if error.errno != errno.EBUSY:  # a file that is mounted by itself cannot be replaced
                raise
            path.write_bytes(data)
            Path(part).unlink()
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """A matplotlib figure, whole, in the format that the file's name ends in."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), **options)
    write_whole(path, picture.getvalue())


def _mode(path: Path) -> int:
    """That of the file, else of a new one: mkstemp's is for its owner alone."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
