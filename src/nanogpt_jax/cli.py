"""What the commands share: they end quietly when nobody reads on, and print in any encoding."""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from nanogpt_jax.config import UserError


def command(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """For a `main(argv) -> exit code`: `… | head` ends it without a word, as SIGPIPE would."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # '×' in ASCII is no reason to stop
        try:
            code = main(argv)
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered would raise again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return code

    return run


@contextlib.contextmanager
def writing_to(option: str, path: Path) -> Iterator[None]:
    """What the system says against writing a result becomes a UserError that names the option."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: cannot write {path}: {error}") from None
