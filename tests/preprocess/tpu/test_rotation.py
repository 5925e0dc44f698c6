"""Positions on their way to angles."""

import jax.numpy as jnp
import numpy as np
import pytest

from smalti.preprocess.rope import Rope
from smalti.preprocess.tpu import rotation


@pytest.mark.parametrize(
    ("S", "block_s", "expected"),
    [(300, 128, (1, 3, 1, 128)), (37, 37, (1, 1, 1, 128)), (40, 16, (1, 3, 1, 128))],
)
def test_positions_lie_along_lanes_a_tile_a_row(S, block_s, expected):
    positions = np.arange(1, S + 1)
    tiled = rotation.tiled_positions(jnp.asarray(positions), block_s)
    assert tiled.shape == expected
    rows = np.asarray(tiled)[0, :, 0, :block_s].ravel()
    np.testing.assert_array_equal(rows[:S], positions)
    both = rotation.tiled_positions(jnp.asarray([positions, positions + 1]), block_s)
    np.testing.assert_array_equal(both[1, ..., :block_s].ravel()[:S], positions + 1)


def test_each_lane_has_the_step_of_its_pair():
    rope = Rope(head_dim=64, rotary_dim=4, theta=100.0, interleaved=True)
    whole, rest = rotation.steps_by_lane(rope, heads=2)
    assert whole.shape == rest.shape == (1, 128)
    steps = rope.steps[0]
    np.testing.assert_array_equal(whole[0, :6], [steps[0], steps[0], steps[1], steps[1], 0, 0])
    np.testing.assert_array_equal(whole[0, 64:], whole[0, :64])
