"""How far the work is, on stderr: a bar on a terminal, now and then a line anywhere else."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

EVERY_S = 10.0  # between lines


class Progress:
    """Use as a context."""

    def __init__(self, what: str = "variants"):
        self._console = Console(stderr=True, highlight=False)
        self._what = what
        self._total = self._done = 0
        self._said = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=None)

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def start(self, total: int) -> None:
        self._total = total
        self._bar.update(self._task, total=total)

    def advance(self, name: str) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=f"compiling {name}")
        late = time.monotonic() - self._said > EVERY_S
        if not self._console.is_terminal and late and self._done < self._total:
            self._said = time.monotonic()
            self._console.print(f"{self._done} of {self._total} {self._what}", soft_wrap=True)
