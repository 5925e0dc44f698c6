"""What each source line of a kernel owns of its cycles.

- A bundle's cycle is shared equally among those of its operations that have a line. Reloads and
  stores of spilled registers have none: their slots go to the lines of the bundle they stand in.
- An empty bundle waits for the operations that come next: it belongs to the lines of the next
  bundle, by address, that has operations.
- Bundles of which no operation has a line, such as those of the pipeline that Pallas puts around a
  kernel, stand apart; so do waits for copies and for the MXU, which are no bundles.

Nothing is left over: the cycles add up to the simulation's.
"""

from dataclasses import dataclass, field

from smalti.estimate.bundles.utilization import UNITS
from smalti.estimate.simulate import Simulation

NO_LINE = "bundles without a line of the source"
FOR_COPIES = "waits for copies"
FOR_MXU = "waits for the MXU"

_SPILL_UNITS = [UNITS.index("VLOAD:FILL"), UNITS.index("VSTORE:SPILL")]
_Place = tuple[str, int] | None


@dataclass
class Line:
    """A line's part of one execution of the kernel."""

    file: str | None  # None: what stands apart
    line: int | None
    what: str | None  # of what stands apart: NO_LINE, FOR_COPIES or FOR_MXU
    cycles: float = 0.0
    empty_bundles: float = field(default=0.0)  # of these cycles
    spills: float = field(default=0.0)  # slots: registers stored for want of room, and reloaded


def source_lines(simulation: Simulation) -> list[Line]:
    """All lines that own something, the most expensive first."""
    found: dict[_Place, Line] = {}
    shares: dict[_Place, float] = {None: 1.0}  # of the next bundle that has operations
    spills = simulation.utilization.used[:, _SPILL_UNITS].sum(axis=1).tolist()
    executions = simulation.executions.tolist()
    for bundle in reversed(simulation.listing.bundles):
        if bundle.operations:
            shares = _shares([operation.source for operation in bundle.operations])
        count = executions[bundle.address]
        if not count:
            continue
        for place, share in shares.items():
            line = found.get(place)
            if line is None:
                file, number = place or (None, None)
                line = found[place] = Line(file, number, None if place else NO_LINE)
            line.cycles += count * share
            line.spills += count * share * spills[bundle.address]
            if not bundle.operations:
                line.empty_bundles += count * share
    lines = list(found.values())
    for what, cycles in (
        (FOR_COPIES, simulation.cycles_waiting),
        (FOR_MXU, simulation.cycles_mxu),
    ):
        if cycles:
            lines.append(Line(None, None, what, float(cycles)))
    return sorted(lines, key=lambda line: -line.cycles)


def _shares(places: list[_Place]) -> dict[_Place, float]:
    there = [place for place in places if place is not None]
    if not there:
        return {None: 1.0}
    shares: dict[_Place, float] = {}
    for place in there:
        shares[place] = shares.get(place, 0.0) + 1 / len(there)
    return shares
