"""Reads libtpu's `*-final_hlo-static-per-bundle-utilization.txt`: the slots each bundle takes."""

from dataclasses import dataclass

import numpy as np

from smalti.estimate.errors import DumpUnreadable

HEADER = "== CAPACTIY:"  # libtpu's spelling
UNITS = (
    *("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL"),
    "SALU",
)


@dataclass(frozen=True)
class Utilization:
    """Slots by unit: `capacity [units]` of one bundle, `used [bundles, units]`."""

    capacity: np.ndarray
    used: np.ndarray


def parse_utilization(text: str, op: str, bundles: int) -> Utilization:
    """Reads a utilisation file of `bundles` rows; `op` names it in errors.

    Raises DumpUnreadable where it is cut short, damaged, or of another format.
    """
    lines = text.splitlines()
    if len(lines) < 4 or lines[0].strip() != HEADER or lines[3].strip() != "== UTILIZATION:":
        raise DumpUnreadable(
            f"{op}: the utilisation file does not start as it did in libtpu 0.0.50"
        )
    units = tuple(name.strip() for name in lines[1].split(","))
    if units != UNITS:
        raise DumpUnreadable(f"{op}: the utilisation file has the units {units}, known are {UNITS}")
    try:
        capacity = np.array([int(word) for word in lines[2].split()])
        used = np.array([[int(w) for w in line.split()] for line in lines[4:] if line.strip()])
    except ValueError as error:
        raise DumpUnreadable(f"{op}: the utilisation file holds what is no number") from error
    if capacity.shape != (len(UNITS),) or used.shape != (bundles, len(UNITS)):
        raise DumpUnreadable(
            f"{op}: the utilisation file has {used.shape[0]} rows for {bundles} bundles; "
            "one of the two is cut short"
        )
    if (used < 0).any() or (used > capacity).any():
        raise DumpUnreadable(f"{op}: a bundle takes more slots than there are; it is damaged")
    return Utilization(capacity, used)
