"""The record of `smalti estimate bench` as tables on a terminal and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smalti.cli.bench_cases import OURS, PEERS
from smalti.cli.bench_record import ALL
from smalti.files import save_figure

_PASS = {"forward": "forward", "both": "fwd+bwd"}
_STYLE = {OURS: ("#CC6677", "D"), "tokamax": ("#332288", "o"), "splash": ("#44AA99", "s")}
_STYLE |= {"jax_flash": ("#DDCC77", "^"), "floor": ("#888888", "_")}


def show(out: Console, record: Mapping[str, Any]) -> None:
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        rows.setdefault((row["chip"], row["pass"]), []).append(row)
    for (chip, which), group in rows.items():
        _show_rows(out, f"{_PASS[which]} on {chip}", group)
        out.print(Text(record["labels"][chip][which]))
    _say(
        out,
        "µs estimated, of the whole jitted call / of its kernels alone; *: the best peer; floor: "
        "the busier of MXU and EUP on visible pairs alone, and which it is; of it: the floor over "
        "our time; bound: our busiest unit, and its share of the time.",
    )
    asked = record["asked"]
    _say(
        out,
        f"bfloat16, causal, B=1, Hq=8, BHSD; {' '.join(record['flags'])}; peers over "
        + ("their whole grids" if asked["full_grid"] else "the choices of cli/bench_variants.py")
        + "; "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    )
    _show_reasons(out, record["rows"])
    _show_summary(out, record["summary"])
    if record["known"] < record["tasks"]:
        _say(out, f"incomplete: {record['known']} of {record['tasks']} programs are known")


def _show_rows(out: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=Text(title), title_justify="left")
    for name in ("D", "S", "Hkv", OURS, *PEERS, "÷ best", "floor", "of it", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ours, least = row["ours"], row["floor"]
        table.add_row(
            *(str(row[key]) for key in ("D", "S", "Hkv")),
            _times(ours),
            *(_times(row["peers"][name], row["best_peer"] == name) for name in PEERS),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{least['time_ns'] / 1e3:,.0f} {least['unit']}",
            "" if ours is None else f"{row['floor_over_ours']:.0%}",
            "" if ours is None else _bound(ours),
        )
    out.print(table)


def _times(found: Mapping[str, Any] | None, best: bool = False) -> str:
    if found is None:
        return "none"
    whole, kernels = found["time_ns"] / 1e3, found["kernels_time_ns"] / 1e3
    return f"{whole:,.0f}{'*' if best else ''}/{kernels:,.0f}"


def _bound(found: Mapping[str, Any]) -> str:
    share = (found["occupancy"] or {}).get(found["bound"])
    return found["bound"] + ("" if share is None else f" {share:.0%}")


def _show_reasons(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    many: dict[tuple[str, str], int] = {}
    for row in rows:
        for reason in row["reasons"].items():
            many[reason] = many.get(reason, 0) + 1
    for (name, reason), count in many.items():
        _say(out, f"{name}: none for {count} of {len(rows)} shapes, because {reason}")


def _show_summary(out: Console, summary: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=Text("ours ÷ best peer, geometric means"), title_justify="left")
    for name in ("pass", "chip", "shapes", "÷ best", "kernels", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("bar", "worst shape", "its bar"):
        table.add_column(name, no_wrap=True)
    for one in summary:
        worst = one["worst"]
        table.add_row(
            _PASS[one["pass"]],
            "all chips" if one["chip"] == ALL else one["chip"],
            f"{one['compared']}/{one['shapes']}",
            *("" if one[key] is None else f"{one[key]:.2f}" for key in ("ratio", "kernels_ratio")),
            "" if one["floor_over_ours"] is None else f"{one['floor_over_ours']:.0%}",
            _verdict(one["bar"], one["met"]),
            "" if worst is None else f"{worst['ratio']:.2f} {_where(worst)}",
            _verdict(one["worst_bar"], one["worst_met"]),
        )
    out.print(table)


def _where(worst: Mapping[str, Any]) -> str:
    return f"{worst['chip']} D={worst['D']} S={worst['S']} Hkv={worst['Hkv']}"


def _verdict(bar: float, met: bool | None) -> str:
    return f"≤ {bar:.2f}: " + {True: "met", False: "missed", None: "open"}[met]


def _say(out: Console, text: str) -> None:
    out.print(Text(text), soft_wrap=True)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Each shape's times over its best peer's: a panel for each pass and chip."""
    save_figure(figure(record), path, dpi=150)


def figure(record: Mapping[str, Any]) -> Figure:
    """What `draw` saves."""
    passes = list(dict.fromkeys(row["pass"] for row in record["rows"]))
    chips = list(dict.fromkeys(row["chip"] for row in record["rows"]))
    drawn = Figure(figsize=(3 + 5 * len(chips), 1.5 + 4 * len(passes)), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(len(passes), len(chips), sharey=True, squeeze=False)
    bars = {one["pass"]: one["bar"] for one in record["summary"]}
    for line, which in zip(panels, passes, strict=True):
        for panel, chip in zip(line, chips, strict=True):
            same = [r for r in record["rows"] if (r["chip"], r["pass"]) == (chip, which)]
            _draw_panel(panel, same, bars[which])
            panel.set_title(f"{_PASS[which]} on {chip}", fontsize=10)
        line[0].set_ylabel("time ÷ best peer's, estimated")
    panels[0][0].set_ylim(bottom=0)  # of all, once all is drawn
    handles, names = panels[0][0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside lower center", ncols=len(names))
    return drawn


def _draw_panel(panel: Axes, rows: Sequence[Mapping[str, Any]], bar: float) -> None:
    panel.axhline(1.0, color="#888888", linewidth=0.8)
    panel.axhline(bar, color="#CC6677", linewidth=0.8, linestyle="--", label="bar")
    times = {
        OURS: [row["ours"] for row in rows],
        **{name: [row["peers"][name] for row in rows] for name in PEERS},
        "floor": [row["floor"] for row in rows],
    }
    for name, found in times.items():
        points = [
            (place, one["time_ns"] / row["peers"][row["best_peer"]]["time_ns"])
            for place, (row, one) in enumerate(zip(rows, found, strict=True))
            if one is not None and row["best_peer"] is not None
        ]
        colour, marker = _STYLE[name]
        panel.plot(
            [place for place, _ in points],
            [value for _, value in points],
            marker,
            color=colour,
            label=name,
        )
    labels = [f"D={row['D']} S={row['S']} Hkv={row['Hkv']}" for row in rows]
    panel.set_xticks(range(len(rows)), labels, rotation=90, fontsize=7)
