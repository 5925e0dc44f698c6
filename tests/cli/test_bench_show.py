import io
from pathlib import Path

import pytest
from rich.console import Console

from smalti.cli.bench_cases import OURS
from smalti.cli.bench_record import summary
from smalti.cli.bench_show import draw, figure, show


def found(time_ns, **others):
    made = {"time_ns": time_ns, "kernels_time_ns": time_ns * 0.9, "bound": "EUP"}
    return {**made, "occupancy": {"EUP": 0.625}, **others}


def row(which, ours, *, D=128):
    peers = {"tokamax": found(100_000.0), "splash": None, "jax_flash": found(300_000.0)}
    return {
        "chip": "v6e",
        "pass": which,
        "D": D,
        "S": 4096,
        "Hkv": 8,
        "best_peer": "tokamax",
        "ours": None if ours is None else found(ours),
        "peers": peers,
        "reasons": {"splash": "VMEM is exhausted [bold]", **({} if ours else {OURS: "not yet"})},
        "ratio": ours and ours / 100_000.0,
        "kernels_ratio": ours and ours / 100_000.0,
        "floor": {"time_ns": 40_000.0, "unit": "MXU"},
        "floor_over_ours": ours and 40_000.0 / ours,
    }


def record(*rows):
    return {
        "rows": list(rows),
        "summary": summary(rows),
        "labels": {"v6e": {"forward": "estimate; made up", "both": "estimate; uncalibrated"}},
        "asked": {"full_grid": False},
        "flags": ["--xla_tpu_scoped_vmem_limit_kib=1"],
        "versions": {"jax": "1.2.3"},
        "tasks": 8,
        "known": 6,
    }


def shown(made):
    out = Console(width=120, record=True, file=io.StringIO())
    show(out, made)
    return out.export_text()


def test_every_number_of_a_row_is_in_the_table():
    text = shown(record(row("forward", 50_000.0), row("both", None)))
    (line,) = [line for line in text.splitlines() if "50/45" in line]
    cells = [cell.strip() for cell in line.strip("│ \n").split("│")]
    assert cells == [
        *("128", "4096", "8", "50/45", "100*/90", "none", "300/270"),
        *("0.50", "40 MXU", "80%", "EUP 62%"),
    ]
    for words in (
        "forward on v6e",
        "fwd+bwd on v6e",
        "estimate; made up",
        "estimate; uncalibrated",
        "--xla_tpu_scoped_vmem_limit_kib=1",
        "jax 1.2.3",
        "splash: none for 2 of 2 shapes, because VMEM is exhausted [bold]",
        "ours: none for 1 of 2 shapes, because not yet",
        "≤ 0.75: met",
        "≤ 0.80: open",
        "0.50 v6e D=128 S=4096 Hkv=8",
        "incomplete: 6 of 8 programs are known",
    ):
        assert words in text


def test_a_missed_bar_is_said():
    text = shown(record(row("forward", 110_000.0)))
    assert "≤ 0.75: missed" in text
    assert "≤ 1.00: missed" in text


@pytest.mark.parametrize("ours", [50_000.0, None])
def test_a_picture_is_written(tmp_path, ours):
    draw(record(row("forward", ours), row("both", ours, D=64)), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_an_svg_says_what_is_in_it(tmp_path: Path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
    draw(record(row("forward", 50_000.0)), tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text()
    for word in ("ours", "tokamax", "floor", "bar", "forward on v6e", "D=128 S=4096 Hkv=8"):
        assert f">{word}</text>" in text


def test_every_point_is_inside_of_its_panel():
    """Also where the last one's times are the largest."""
    made = record(
        *(row("forward", 50_000.0) | {"chip": chip} for chip in ("v6e", "v7x")),
        *(row("both", time) | {"chip": chip} for chip, time in (("v6e", 1e5), ("v7x", 5e5))),
    )
    for panel in figure(made).axes:
        low, high = panel.get_ylim()
        assert low == 0
        assert all(max(line.get_ydata(), default=0) < high for line in panel.get_lines())
