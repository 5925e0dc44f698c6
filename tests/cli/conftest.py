import functools

import pytest

from tests.cli.calls import Run


@pytest.fixture
def smalti(capsys):
    """`smalti("estimate", "fn", …)` runs the command."""
    return functools.partial(Run, capsys)
