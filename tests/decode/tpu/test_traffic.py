"""Bytes from HBM, by the compiled schedule: only blocks with a token are copied, and the first."""

import pytest

from smalti.decode.tpu.blocks import STEP_BYTES
from tests.decode.estimate import Shape, estimated
from tests.support.libtpu import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]


@pytest.mark.parametrize("D", [128, 64])
def test_the_kernels_read_what_is_live(D):
    def shape(length: int) -> Shape:
        return Shape(B=2, Hq=8, Hkv=4, D=D, window=12_000, length=length)

    read = {n: estimated(shape(n), "v6e").bytes_read for n in (0, 100, 4_000, 100_000)}
    a_block_each = 2 * STEP_BYTES
    assert read[0] == read[100] <= 1.05 * a_block_each
    assert read[4_000] <= shape(4_000).live_bytes + 1.05 * a_block_each
    full = shape(100_000).live_bytes
    assert full <= read[100_000] <= 1.05 * full
