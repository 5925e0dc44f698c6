"""What one candidate of a search came to."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trial:
    """Its estimate, or why it has none. Without a `reason` there are numbers.

    `kernels_time_ns` and what follows are None where an old journal has them not, and `vmem_bytes`
    where there is no kernel.
    """

    cycles: float | None = None
    time_ns: float | None = None
    bytes_hbm: int | None = None
    bound: str | None = None
    kernels_time_ns: float | None = None  # of it, in Pallas kernels
    occupancy: dict[str, float] | None = None  # by unit, as `Estimate.occupancy`
    vmem_bytes: int | None = None  # of the kernel that takes most
    reason: str | None = None
    lasting: bool = True  # it would come to the same on another day: no want of memory, no timeout

    def __post_init__(self):
        if (self.cycles is None) == (self.reason is None):
            raise ValueError(f"a trial has cycles or a reason for having none, got {self}")

    def values(self) -> dict[str, Any]:
        """As JSON can write it."""
        return asdict(self)
