"""Compiled programs on disk, so that each is compiled once. Deleting the folder is safe."""

import gzip
import hashlib
import json
import os
import tempfile
import time
import warnings
import zlib
from dataclasses import asdict
from pathlib import Path

from smalti.estimate.compile.run import Compiled
from smalti.estimate.program import KernelDump, Memory

# What an entry holds and how it is made: to be changed with that.
FORMAT = {"format": 1, "xla_ops": True}
_PART_IS_STALE_S = 3600.0


def cache_folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """`chosen`, else $SMALTI_CACHE, else smalti in $XDG_CACHE_HOME or ~/.cache."""
    if chosen is not None:
        return Path(chosen).expanduser()
    if named := os.environ.get("SMALTI_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "smalti"


def cache_key(module: bytes, **what: object) -> str:
    """A name for everything that the compiled program depends on; `what` as JSON can write it."""
    settings = json.dumps({**FORMAT, **what}, sort_keys=True)
    return hashlib.sha256(settings.encode() + b"\0" + module).hexdigest()


def load(folder: Path, key: str) -> Compiled | None:
    """The entry; None where there is none, or one that is cut short or damaged."""
    try:
        # gzip's checksum finds damage; reading to the end is what checks it.
        with gzip.open(_path(folder, key), "rt", encoding="utf-8") as file:
            value = json.load(file)
        kernels = {op: KernelDump(**dump) for op, dump in value["kernels"].items()}
        xla_ops = {op: KernelDump(**dump) for op, dump in value["xla_ops"].items()}
        texts = [value["hlo"]]
        for dump in (*kernels.values(), *xla_ops.values()):
            texts += [dump.op, dump.bundles, dump.utilization]
        if not all(isinstance(text, str) for text in texts):
            return None
        return Compiled(value["hlo"], Memory(**value["memory"]), kernels, xla_ops)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError):
        return None


def store(folder: Path, key: str, compiled: Compiled) -> None:
    """Write the entry, whole or not at all. A cache that cannot be written is a warning."""
    path = _path(folder, key)
    data = gzip.compress(json.dumps(asdict(compiled)).encode(), compresslevel=6, mtime=0)
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_parts(path.parent)
        descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        warnings.warn(
            f"the compiled program was not cached in {path.parent} ({error.strerror or error}); "
            "it will be compiled again next time. Set SMALTI_CACHE to a folder that can be written",
            stacklevel=3,
        )


def _path(folder: Path, key: str) -> Path:
    return folder / "programs" / f"{key}.json.gz"


def _remove_stale_parts(folder: Path) -> None:
    """What processes left that were killed while they wrote."""
    for part in folder.glob("*.part"):
        try:
            if time.time() - part.stat().st_mtime > _PART_IS_STALE_S:
                part.unlink()
        except FileNotFoundError:
            pass  # another process was quicker
