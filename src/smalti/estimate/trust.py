"""The label of every number: how far off estimates for a chip were found to be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smalti.files import write_whole

if TYPE_CHECKING:
    from smalti.estimate.calibrate.report import Predicted

ERRORS = Path(__file__).with_name("errors.json")


@dataclass(frozen=True)
class Trust:
    """What is known of the errors of one kind of kernel; none where no published time is."""

    kind: str  # "forward kernels on v6e"
    errors: tuple[float, ...]  # relative, of published rows that tell about it, each left out

    @property
    def label(self) -> str:
        if not self.errors:
            return f"estimate; uncalibrated: no published time of {self.kind} is known"
        off = np.abs(self.errors)
        return (
            f"estimate; {len(off)} published times of {self.kind}, each left out of the fit, were "
            f"off by {np.median(off):.0%} in the median, {off.max():.0%} at worst"
        )


@cache
def trust(chip: str, which: str = "forward", dtype: str = "bfloat16") -> Trust:
    """How far to trust an estimate, from what `calibrate --write` last found.

    which: "forward" for kernels in general, or "backward" or "both" of attention.
    """
    found = json.loads(ERRORS.read_text(encoding="utf-8"))["rows"]
    passes = ("forward",) if which == "forward" else ("backward",)
    errors = [
        row["left_out_error"]
        for row in found
        if row["chip"] == chip and row["which"] in passes and dtype == "bfloat16"
    ]
    backward = "" if which == "forward" else "backward "
    return Trust(f"{dtype} {backward}kernels on {chip}", tuple(errors))


def write_errors(rows: Iterable[Predicted], versions: dict[str, str]) -> None:
    """Keeps what `trust` reads: the errors of every row that tells about its chip."""
    kept = [
        {
            "id": row.id,
            "chip": row.chip,
            "which": row.which,
            "error": round(row.error, 6),
            "left_out_error": round(row.left_out_error, 6),
        }
        for row in rows
        if not row.carried_by_dispatch
    ]
    write_whole(ERRORS, json.dumps({"versions": versions, "rows": kept}, indent=1) + "\n")
    trust.cache_clear()
