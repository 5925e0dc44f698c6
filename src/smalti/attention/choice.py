"""Which implementation runs, and why."""

from __future__ import annotations

import dataclasses

from smalti.attention.validation import suggest
from smalti.backend import target_platform

IMPLEMENTATIONS = ("reference", "blockwise", "pallas")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that a call of `smalti.attention` runs, and the reason."""

    implementation: str
    platform: str
    reason: str

    def __str__(self):
        return f"{self.implementation} on {self.platform}: {self.reason}"


def choose(implementation: str | None, *, block_sizes, interpret) -> Choice:
    """Raises ValueError for an argument that the implementation would ignore, and
    NotImplementedError for what it cannot do; a named implementation never falls back."""
    platform = target_platform()
    if implementation is None:
        choice = Choice(
            "blockwise",
            platform,
            "plain JAX that visits only the tiles the mask leaves alive"
            if platform == "cpu"
            else "plain JAX that visits only live tiles; the Pallas kernels are not built yet",
        )
    else:
        suggest("implementation", implementation, IMPLEMENTATIONS)
        choice = Choice(implementation, platform, "named by the caller")
    if choice.implementation == "pallas":
        raise NotImplementedError(
            "implementation='pallas': the Pallas TPU kernels are not part of this version. "
            "Use implementation='blockwise' (any platform) or None."
        )
    if interpret is not None:
        raise ValueError(
            f"interpret: got {interpret!r} with implementation {choice.implementation!r}; it "
            "applies to 'pallas' only. Leave it out."
        )
    if block_sizes is not None and choice.implementation == "reference":
        raise ValueError("block_sizes: 'reference' has no tiles. Leave it out, or use 'blockwise'.")
    return choice
