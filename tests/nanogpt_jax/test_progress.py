import io

import pytest
from rich.console import Console

from nanogpt_jax import progress


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_terminal_is_too_narrow_for_the_count(monkeypatch, width):
    text = io.StringIO()
    out = Console(width=width, file=text, force_terminal=True, color_system=None, soft_wrap=True)
    monkeypatch.setattr(progress, "Console", lambda **_: out)
    with progress.Display(first=0, total=3000, every=10) as display:
        display.step(140, 1.9263, 1.9230, 12_345.0)
    assert " 140/3000 " in text.getvalue()
