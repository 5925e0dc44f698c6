"""Candidates with made-up times, and a search that is killed in its middle."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smalti.estimate.peers import Variant
from smalti.estimate.tune import Found, Journal, Trial, search

# By block: cycles, or why there are none.
TIMES: dict[int, float | str] = {
    512: 300.0,
    1024: 200.0,
    2048: "VMEM is exhausted on v6e",
    256: 250.0,
    128: 200.0,
}


def never() -> Any:
    raise AssertionError("a fake is not built")


def variants(blocks: Sequence[int] = tuple(TIMES)) -> list[Variant]:
    return [Variant("fake", {"block": block}, "made up", never) for block in blocks]


def keys(version: str = "1") -> list[dict[str, Any]]:
    return [{"blocks": dict(v.blocks), "version": version} for v in variants()]


def trial(place: int) -> Trial:
    said = list(TIMES.values())[place]
    if isinstance(said, str):
        return Trial(reason=said)
    return Trial(cycles=said, time_ns=said / 1.75, bytes_hbm=1000, bound="MXU")


class Measure:
    """`trial`, and which were asked for; `raises` at a place instead."""

    def __init__(self, raises: dict[int, BaseException] | None = None):
        self.places: list[int] = []
        self._raises = raises or {}

    def __call__(self, place: int) -> Trial:
        self.places.append(place)
        if place in self._raises:
            raise self._raises[place]
        return trial(place)


def run(path: Path, measure: Callable[[int], Trial], version: str = "1", **budget: Any) -> Found:
    return search(variants(), measure, Journal(path), keys(version), **budget)


def killed_at_the_third(place: int) -> Trial:
    if place == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return trial(place)


def slow(place: int) -> Trial:
    """The first is done at once; the others take for ever."""
    if place:
        print("waits", flush=True)
        time.sleep(600)
    return trial(place)


def main(what: str, path: str) -> None:
    if what == "killed":
        run(Path(path), killed_at_the_third)
    else:
        found = run(Path(path), slow, jobs=2)
        print("interrupted", found.interrupted, sorted(found.trials), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
