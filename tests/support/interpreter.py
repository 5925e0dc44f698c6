"""TPU interpret mode at its strictest: memory starts as NaN, reads out of bounds raise, and races
between copies and kernels are found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


@contextlib.contextmanager
def no_races(launches: int) -> Iterator[None]:
    """Fails if a kernel interpreted in the block raced, or if not just so many were.

    JAX keeps the detector of the last kernel alone, and has no public name for it yet.
    """
    detector, detectors = interpret_pallas_call.RaceDetectionState, []

    def recorded(*args, **kwargs):
        detectors.append(detector(*args, **kwargs))
        return detectors[-1]

    with mock.patch.object(interpret_pallas_call, "RaceDetectionState", recorded):
        yield
    assert len(detectors) == launches, f"{len(detectors)} kernels ran, not {launches}"
    assert not any(x.races_found for x in detectors)
