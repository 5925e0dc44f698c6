"""What one candidate of a search came to."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trial:
    """Its estimate, or why it has none. Without a `reason` all the numbers are there."""

    cycles: float | None = None
    time_ns: float | None = None
    bytes_hbm: int | None = None
    bound: str | None = None
    reason: str | None = None
    lasting: bool = True  # it would come to the same on another day: no want of memory, no timeout

    def __post_init__(self):
        if (self.cycles is None) == (self.reason is None):
            raise ValueError(f"a trial has cycles or a reason for having none, got {self}")

    def values(self) -> dict[str, Any]:
        """As JSON can write it."""
        return asdict(self)
