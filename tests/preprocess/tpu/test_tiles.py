"""Block sizes and the rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.preprocess.rope import cos_sin
from smalti.preprocess.tpu import tiles

WIDE = {"B": 1, "S": 4096, "Hq": 64, "Hkv": 8, "D": 128, "Dv": 128, "itemsize": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 32),
        ({"itemsize": 2}, 64),
        ({"Hq": 8, "Hkv": 2}, 256),
        ({"Hq": 8, "Hkv": 2, "S": 100}, 100),  # the whole axis needs no multiple
        ({"Hq": 4096}, 16),  # nothing fits: the smallest, and the compiler decides
        ({"Hq": 8, "Hkv": 2, "D": 2, "Dv": 2}, 256),  # two lanes take up the room of 128
    ],
)
def test_a_tile_takes_at_most_the_budget(changes, expected):
    shapes = tiles.Shapes(**WIDE | changes)
    assert shapes.block_s(copies=2, wanted=None) == expected
    assert shapes.block_s(copies=2, wanted=48) == min(48, shapes.S)


@pytest.mark.parametrize("D", [2, 6, 64])
def test_rotate_transposed_undoes_and_transposes(D):
    cos, sin = tiles.rotation_tables(*cos_sin(jnp.arange(7), D, 10_000.0))
    assert cos.shape == sin.shape == (1, 7, D)
    cos, sin = cos[0], sin[0]
    x = jax.random.normal(jax.random.key(0), (7, D))

    @jax.jit
    def run(x):
        transposed = jax.linear_transpose(lambda x: tiles.rotate(x, cos, sin), x)
        back = tiles.rotate_transposed(tiles.rotate(x, cos, sin), cos, sin)
        return back, tiles.rotate_transposed(x, cos, sin), transposed(x)[0]

    back, ours, of_jax = run(x)
    np.testing.assert_allclose(ours, of_jax, atol=1e-6)
    np.testing.assert_allclose(back, x, atol=1e-6)
