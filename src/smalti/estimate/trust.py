"""The label of every number: how far off estimates for a chip were found to be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from smalti.estimate.calibrate.report import Predicted

ERRORS = Path(__file__).with_name("errors.json")


@dataclass(frozen=True)
class Trust:
    """What is known of the errors on one chip; none where no published time is."""

    chip: str
    errors: tuple[float, ...]  # relative, of published rows that tell about it, each left out

    @property
    def label(self) -> str:
        if not self.errors:
            return f"estimate; uncalibrated: no published time of a kernel on {self.chip} is known"
        off = np.abs(self.errors)
        return (
            f"estimate; on {self.chip}, {len(off)} published times of bfloat16 kernels, each left "
            f"out of the fit, were off by {np.median(off):.0%} in the median, {off.max():.0%} at "
            "worst"
        )


@cache
def trust(chip: str) -> Trust:
    """How far to trust an estimate for `chip`, from what `calibrate --write` last found."""
    found = json.loads(ERRORS.read_text(encoding="utf-8"))
    errors = [row["left_out_error"] for row in found["rows"] if row["chip"] == chip]
    return Trust(chip, tuple(errors))


def write_errors(rows: Iterable[Predicted], versions: dict[str, str]) -> None:
    """Keeps what `trust` reads: the errors of every row that tells about its chip."""
    kept = [
        {
            "id": row.id,
            "chip": row.chip,
            "error": round(row.error, 6),
            "left_out_error": round(row.left_out_error, 6),
        }
        for row in rows
        if not row.carried_by_dispatch
    ]
    ERRORS.write_text(json.dumps({"versions": versions, "rows": kept}, indent=1) + "\n")
    trust.cache_clear()
