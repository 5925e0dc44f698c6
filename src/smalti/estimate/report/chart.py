"""Records as a picture. Needs matplotlib, which the extra `cli` brings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smalti.estimate.report.entry import OCCUPANCY
from smalti.estimate.report.record import entries_of
from smalti.files import save_figure

# Paul Tol's "muted" and a grey: told apart without colour vision, too.
COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#888888"),
)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Time beside the bound of the busiest unit, and how busy each unit is, stacked."""
    entries = dict(sorted(entries_of(record).items(), key=lambda item: item[1]["cycles"]))
    names = list(entries)
    places = range(len(names))
    figure = Figure(figsize=(11, max(4.0, 1.8 + 0.7 * len(names))), layout="constrained")
    FigureCanvasAgg(figure)
    times, shares = figure.subplots(1, 2, sharey=True)

    heights = [found["time_ns"] / 1e3 for found in entries.values()]
    bounds = [(found["bound_time_ns"] or 0.0) / 1e3 for found in entries.values()]
    bars = times.barh([p - 0.2 for p in places], heights, 0.38, label="time", color=COLOURS[0])
    times.bar_label(bars, fmt="{:,.1f}", padding=3)
    bars = times.barh(
        [p + 0.2 for p in places], bounds, 0.38, label="busiest unit alone", color=COLOURS[1]
    )
    times.bar_label(bars, [found["bound"] for found in entries.values()], padding=3)
    times.set_yticks(list(places), names)
    times.invert_yaxis()
    times.margins(x=0.15)
    times.set_xlabel("µs, estimated")
    times.legend(loc="best")

    left = [0.0] * len(names)
    for (unit, key), colour in zip(OCCUPANCY.items(), COLOURS, strict=True):
        widths = [100 * found["occupancy"].get(key, 0.0) for found in entries.values()]
        shares.barh(list(places), widths, 0.6, left=left, label=unit, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    shares.set_xlabel("busy, % of the simulated time, units stacked (HBM: of all the time)")
    shares.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{_title(record)}\n{record['label']}", fontsize=10)
    save_figure(figure, path, dpi=150)


def _title(record: Mapping[str, Any]) -> str:
    if record["kind"] == "fn":
        return f"{record['function']} on {record['topology']}"
    case = record["case"]
    shape = ",".join(f"{key}={case[key]}" for key in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
    return f"attention {record['pass']}, {shape}, mask {case['mask']}, on {record['chip']}"
