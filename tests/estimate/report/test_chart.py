import pytest

from smalti.estimate.report.chart import draw
from tests.estimate.report import records


@pytest.mark.parametrize("make", [records.attention, records.fn])
def test_a_picture_is_written(tmp_path, make):
    draw(make(), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_an_svg_says_what_is_in_it(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
    draw(records.attention(), tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text()
    for word in ("jax_flash", "xla", records.LABEL, "time", "busiest unit alone", "VALU"):
        assert f">{word}</text>" in text
