"""TPU interpret mode at its strictest: memory starts as NaN, reads out of bounds raise."""

import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


def races_found() -> bool:
    """Whether the last interpreted call raced. JAX has no public name for it yet."""
    return interpret_pallas_call.races.races_found


# Small, for a call takes seconds; each ends in a cut tile of 8 rows.
SIZES = [
    {"S": 21, "Hq": 2, "Hkv": 1},
    {"S": 9, "D": 10, "dtype": "bfloat16", "positions": np.arange(18).reshape(2, 9)},
]
