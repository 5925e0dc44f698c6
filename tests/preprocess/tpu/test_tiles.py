"""Block sizes."""

import pytest

from smalti.preprocess.tpu import tiles

WIDE = {"B": 1, "S": 4096, "Hq": 64, "Hkv": 8, "D": 128, "Dv": 128, "itemsize": 4}


@pytest.mark.parametrize(
    ("changes", "gradients", "expected"),
    [
        ({}, False, 64),
        ({}, True, 32),
        ({"itemsize": 2}, False, 128),
        ({"Hq": 8, "Hkv": 2}, False, 256),
        ({"Hq": 8, "Hkv": 2, "itemsize": 2}, True, 512),
        ({"Hq": 8, "Hkv": 2, "S": 100}, False, 100),  # the whole axis needs no multiple
        ({"Hq": 4096}, False, 16),  # nothing fits: the smallest, and the compiler decides
        # Two lanes take up the room of 128, but heads side by side those of 2·H.
        ({"D": 2, "Dv": 2}, False, 128),
        ({"Hq": 8, "Hkv": 2, "D": 2, "Dv": 2}, False, 512),
    ],
)
def test_a_tile_takes_at_most_the_budget(changes, gradients, expected):
    shapes = tiles.Shapes(**WIDE | changes)
    assert shapes.block_s(None, gradients=gradients) == expected
    assert shapes.block_s(48, gradients=gradients) == min(48, shapes.S)


@pytest.mark.parametrize(("D", "itemsize", "width"), [(64, 2, 128), (64, 4, 64), (80, 2, 80)])
def test_heads_of_16_bits_fill_a_register(D, itemsize, width):
    assert tiles.Shapes(**WIDE | {"D": D, "itemsize": itemsize}).width == width
