"""Which implementation runs, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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


def choose(
    implementation: str | None,
    *,
    block_sizes,
    interpret,
    refusal: Callable[[], str | None],
) -> Choice:
    """Raises ValueError for an argument that the implementation would ignore, and
    NotImplementedError for what it cannot do; a named implementation never falls back.

    refusal: says what of the call the Pallas kernels cannot do, or None.
    """
    platform = target_platform()
    if implementation is not None:
        suggest("implementation", implementation, IMPLEMENTATIONS)
        choice = Choice(implementation, platform, "named by the caller")
    elif platform != "tpu":
        choice = Choice(
            "blockwise", platform, "plain JAX that visits only the tiles the mask leaves alive"
        )
    elif (why := refusal()) is None:
        choice = Choice("pallas", platform, "Pallas kernels that visit only live tiles")
    else:
        choice = Choice(
            "blockwise", platform, f"plain JAX; the Pallas kernels cannot do this: {why}"
        )
    if choice.implementation == "pallas":
        if implementation is not None and (why := refusal()) is not None:
            raise NotImplementedError(f"implementation='pallas': {why}")
        if platform != "tpu" and not interpret:
            raise NotImplementedError(
                f"implementation='pallas': its kernels are for TPUs, and this is a {platform}. "
                "Pass interpret=True to run them in an interpreter (slow), or use "
                "implementation='blockwise' or None."
            )
    elif interpret is not None:
        raise ValueError(
            f"interpret: got {interpret!r} with implementation {choice.implementation!r}; it "
            "applies to 'pallas' only. Leave it out."
        )
    if block_sizes is not None and choice.implementation == "reference":
        raise ValueError("block_sizes: 'reference' has no tiles. Leave it out, or use 'blockwise'.")
    return choice
