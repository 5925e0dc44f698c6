"""Running the command line in this process."""

import pytest

from smalti.cli import main


class Run:
    """A command's exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object):
        capsys.readouterr()
        self.code = main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    @property
    def line(self) -> str:
        """The one line of an error."""
        (line,) = self.err.splitlines()
        assert line.startswith("smalti: ")
        return line.removeprefix("smalti: ")
