"""A step fits VMEM, and blocks are alike."""

import hypothesis
import hypothesis.strategies as st

from smalti.decode.tpu.blocks import STEP_BYTES, Blocks, choose
from smalti.tpu.lanes import LANES

SIZES = {"Hkv": 8, "query_rows": 8, "D": 128, "Dv": 128, "itemsize": 2}


def test_what_estimates_found_quickest():
    """`docs/decoding.md` has the times."""
    assert choose(rows=4112, **SIZES) == Blocks(heads=4, rows=1408)
    assert choose(rows=1024, **SIZES) == Blocks(heads=4, rows=1024)
    assert choose(rows=256, **SIZES) == Blocks(heads=8, rows=256)


@hypothesis.settings(deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.integers(1, 80),
    st.integers(1, 100_000),
    st.integers(1, 64),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([2, 4]),
)
def test_any_sizes_are_divided(Hkv, rows, query_rows, D, Dv, itemsize):
    blocks = choose(Hkv=Hkv, rows=rows, query_rows=8 * query_rows, D=D, Dv=Dv, itemsize=itemsize)
    assert Hkv % blocks.heads == 0
    if blocks.rows < rows:
        assert blocks.rows % LANES == 0
        count = -(-rows // blocks.rows)
        assert count * blocks.rows - rows < count * LANES  # none is almost empty
    # Up to rounding to lanes.
    least = blocks.heads * (blocks.rows - LANES) * (D + Dv) * itemsize
    assert least <= STEP_BYTES
