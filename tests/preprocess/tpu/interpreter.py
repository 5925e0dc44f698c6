"""What the kernels are interpreted for, and how near to a whole tile a cut one comes."""

import ml_dtypes
import numpy as np

PARTIAL = {"rope_interleaved": True, "rotary_dim": 6}
# Small, for a call takes seconds; each ends in a cut tile of 8 rows.
SIZES = [
    {"S": 21, "Hq": 2, "Hkv": 1},
    {"S": 9, "D": 10, "dtype": "bfloat16", "positions": np.arange(18).reshape(2, 9)},
    {"S": 9, "D": 64, "Hq": 3, "Hkv": 3, "dtype": "bfloat16", **PARTIAL},
    {"S": 9, "D": 10, "norm_eps": None, "scales": False},
]


def assert_same_but_for_rounding(got, expected):
    """Interpreted kernels are XLA's programs for a CPU: where these join a product and a sum into
    one operation depends on shapes. A few units in the last place, of numbers of order 1."""
    for x, y in zip(got, expected, strict=True):
        unit = float(ml_dtypes.finfo(y.dtype).eps)
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert (np.abs(x - y) <= 4 * unit * np.maximum(1, np.abs(y))).all()


def options(case) -> dict:
    """What `calls.kernels` has to be told about a case."""
    names = "norm_eps", "rope_interleaved", "rotary_dim"
    return {name: getattr(case, name) for name in names}
