"""What a search has found so far, in a file, so that it goes on where it stopped."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.estimate.tune.trial import Trial


class Journal:
    """Trials by key, a JSON line each. Several searches may write to one journal at once.

    A key holds all that a trial depends on, versions too: what is stale is not found again. A line
    that cannot be read, such as the last one of a process that was killed, counts in `unreadable`
    and is otherwise as if it were not there.

    Raises OSError where the file can be neither read nor written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.unreadable = 0
        self._trials: dict[str, Trial] = {}
        # To append, and to know at once whether that will be possible.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read()
        # A torn line is ended by the first append, so that it spoils no other.
        self._torn = bool(data) and not data.endswith(b"\n")
        for line in data.split(b"\n"):
            if line.strip():
                self._read(line)

    def find(self, key: Mapping[str, Any]) -> Trial | None:
        return self._trials.get(_text(key))

    def add(self, key: Mapping[str, Any], trial: Trial) -> None:
        """On disk when this returns. One write, so that lines of two searches do not mix."""
        self._trials[_text(key)] = trial
        line = json.dumps({"key": key, "trial": trial.values()}, sort_keys=True) + "\n"
        if self._torn:
            line = "\n" + line
        data = line.encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            written = os.write(descriptor, data)
            self._torn = written != len(data)
            if self._torn:
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, line: bytes) -> None:
        try:
            value = json.loads(line)
            self._trials[_text(value["key"])] = Trial(**value["trial"])
        except (ValueError, TypeError, KeyError):
            self.unreadable += 1


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
