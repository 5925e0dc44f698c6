"""What a run shows while it works: a bar on a terminal, plain lines anywhere else."""

import time

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class Display:
    """Use as a context. `every`: steps between plain lines. Only the first process shows."""

    def __init__(self, first: int, total: int, every: int):
        self._first, self._total, self._every = first, total, every
        self._start = time.perf_counter()
        self._console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() != 0)
        self._bar = Progress(
            TextColumn("training"),
            # The bar has what the numbers leave: a narrow terminal cuts no count.
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(
                table_column=Column(no_wrap=True, min_width=2 * len(f"{total}") + 1)
            ),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total, completed=first, numbers="compiling …")

    def __enter__(self):
        self._start = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def step(self, step: int, loss: float, val_loss: float | None, tokens_per_s: float) -> None:
        val = "" if val_loss is None else f"  val {val_loss:.4f}"
        numbers = f"loss {loss:.4f}{val}  {tokens_per_s:,.0f} tokens/s"
        shown = "" if val_loss is None else f"step {step}: loss {loss:.4f}{val}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, numbers=numbers)
            if shown:
                self.say(shown)
        elif step % self._every == 0 or step == self._total or val_loss is not None:
            passed = time.perf_counter() - self._start
            eta = passed / (step - self._first) * (self._total - step)
            self.say(f"step {step}/{self._total}  {numbers}  ETA {_clock(eta)}")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
