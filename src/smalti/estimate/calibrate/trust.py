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
    errors: tuple[float, ...]  # relative, of published rows on this chip that tell about kernels
    versions: dict[str, str]  # with which they were found

    @property
    def calibrated(self) -> bool:
        return bool(self.errors)

    @property
    def label(self) -> str:
        if not self.errors:
            return f"estimate; uncalibrated: no published time of a kernel on {self.chip} is known"
        off = np.abs(self.errors)
        return (
            f"estimate; those for {self.chip} are off by {np.median(off):.0%} in the median and "
            f"{off.max():.0%} at worst, over {len(off)} published times"
        )


@cache
def trust(chip: str) -> Trust:
    """How far to trust an estimate for `chip`, from what `calibrate --write` last found."""
    found = json.loads(ERRORS.read_text(encoding="utf-8"))
    errors = [row["error"] for row in found["rows"] if row["chip"] == chip]
    return Trust(chip, tuple(errors), found["versions"])


def write_errors(rows: Iterable[Predicted], versions: dict[str, str]) -> None:
    """Keeps what `trust` reads: of every row that tells about its chip, the error."""
    kept = [
        {"id": row.id, "chip": row.chip, "error": round(row.error, 4)}
        for row in rows
        if not row.carried_by_dispatch
    ]
    ERRORS.write_text(json.dumps({"versions": versions, "rows": kept}, indent=1) + "\n")
    trust.cache_clear()
