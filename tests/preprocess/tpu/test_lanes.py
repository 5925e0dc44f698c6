"""Chunks of heads, and products that move lanes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from smalti.preprocess.rope import Rope
from smalti.preprocess.tpu import lanes


@pytest.mark.parametrize(
    ("H", "D", "itemsize", "expected"),
    [
        (3, 128, 2, [slice(0, 128), slice(128, 256), slice(256, 384)]),
        (3, 64, 2, [slice(0, 128), slice(128, 192)]),
        (5, 32, 2, [slice(0, 128), slice(128, 160)]),
        (2, 80, 2, [slice(0, 80), slice(80, 160)]),
        (1, 256, 2, [slice(0, 256)]),
        (2, 64, 4, [slice(0, 64), slice(64, 128)]),
    ],
)
def test_heads_share_the_lanes_of_a_register(H, D, itemsize, expected):
    chunks = list(lanes.chunks(H, D, itemsize))
    assert [chunk.lanes for chunk in chunks] == expected
    assert [chunk.width for chunk in chunks] == [s.stop - s.start for s in expected]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("D", "rotary_dim"), [(2, 2), (6, 4), (64, 64), (64, 16), (128, 128)])
def test_the_partner_matrix_rotates_and_its_transpose_rotates_back(D, rotary_dim, interleaved):
    rope = Rope(head_dim=D, rotary_dim=rotary_dim, theta=100.0, interleaved=interleaved)
    heads = lanes.heads_in_chunk(D, itemsize=2)
    a, b = rope.pairs
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, heads, D))
    angle = rng.normal(size=rotary_dim // 2)
    cos, sin = np.ones(D), np.zeros(D)
    cos[rope.pairs], sin[rope.pairs] = np.cos(angle), np.sin(angle)
    expected = x.copy()
    expected[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
    expected[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)

    P, x, expected = lanes.partner_matrix(rope, heads), x.reshape(5, -1), expected.reshape(5, -1)
    cos, sin = np.tile(cos, heads), np.tile(sin, heads)
    turned = x * cos + (x @ P) * sin
    np.testing.assert_allclose(turned, expected, atol=1e-12)
    np.testing.assert_allclose(turned * cos - (turned @ P) * sin, x, atol=1e-12)


def test_products_with_a_permutation_are_exact():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 128)).astype(np.float32) * 10.0 ** rng.integers(-20, 20, (64, 128))
    x = x.astype(np.float32)
    rope = Rope(head_dim=128, rotary_dim=128, theta=100.0, interleaved=True)
    P = lanes.partner_matrix(rope, heads=1)
    exact = jax.jit(lanes.exact_product, static_argnums=2)
    matrix = jnp.asarray(P, jnp.bfloat16)
    np.testing.assert_array_equal(exact(x, matrix, 3), x @ P)
    narrow = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(exact(narrow, matrix, 3), np.asarray(narrow, np.float32) @ P)
    assert (np.asarray(exact(x, matrix, 2)) != x @ P).any()


@pytest.mark.parametrize("D", [32, 64])
def test_means_over_some_lanes_are_good_to_16_bits(D):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 128)).astype(ml_dtypes.bfloat16).astype(np.float64)
    any_terms = rng.normal(size=(16, 128)).astype(np.float32).astype(np.float64)
    means = jax.jit(lanes.mean_of_head, static_argnums=1)
    for terms, allowed in ((x * x, 1e-6), (any_terms, 2.0**-15)):
        expected = np.repeat(terms.reshape(16, -1, D).mean(-1), D, axis=1)
        size = np.repeat(np.abs(terms).reshape(16, -1, D).mean(-1), D, axis=1)
        error = np.abs(means(jnp.asarray(terms, jnp.float32), D) - expected)
        assert (error <= allowed * size).all()


def test_a_whole_head_is_averaged_where_it_lies():
    x = np.ones((8, 80), np.float32)
    np.testing.assert_array_equal(lanes.mean_of_head(jnp.asarray(x), 80), np.ones((8, 1)))
