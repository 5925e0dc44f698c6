"""The command line: `smalti`, or `python -m smalti.cli`. Needs the extra `cli`."""

from smalti.cli.main import main

__all__ = ["main"]
