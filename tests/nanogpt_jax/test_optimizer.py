"""Schedules, and who updates what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nanogpt_jax.config import OptimizerConfig
from nanogpt_jax.model import init_params
from nanogpt_jax.optimizer import block_matrices, make_optimizer, make_schedule

from .conftest import tiny_config

MATRICES = {"q", "k", "v", "out", "up", "down"}


def at(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_wsd_rises_stays_and_falls():
    config = OptimizerConfig(warmup_fraction=0.1, decay_fraction=0.4, final_fraction=0.1)
    schedule = make_schedule(config, 100)
    np.testing.assert_allclose(at(schedule, [0, 5, 10, 30, 60]), [1 / 11, 6 / 11, 1, 1, 1], 1e-6)
    np.testing.assert_allclose(at(schedule, [80, 100]), [0.55, 0.1], rtol=1e-6)
    assert all(np.diff(at(schedule, range(60, 101))) < 0)


def test_cosine_rises_and_falls():
    config = OptimizerConfig(schedule="cosine", warmup_fraction=0.1, final_fraction=0.0)
    schedule = make_schedule(config, 100)
    np.testing.assert_allclose(at(schedule, [0, 10, 55, 100]), [1 / 11, 1, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(name, steps):
    schedule = make_schedule(OptimizerConfig(schedule=name), steps)
    assert all(0 < rate <= 1 for rate in at(schedule, range(steps)))


@pytest.fixture(scope="module")
def params():
    return init_params(tiny_config().model, 11, 0)


def updates_of(config, params, grad=None):
    optimizer = make_optimizer(config, 10)
    grad = grad or jax.tree.map(lambda x: jax.random.normal(jax.random.key(3), x.shape), params)
    update = jax.jit(lambda grad, params: optimizer.update(grad, optimizer.init(params), params))
    return update(grad, params)[0], grad


def test_only_matrices_of_blocks_are_block_matrices(params):
    for path, chosen in jax.tree_util.tree_leaves_with_path(block_matrices(params)):
        assert chosen == (path[-1].key in MATRICES), path


def test_muon_takes_the_matrices_and_adam_the_rest(params):
    config = OptimizerConfig(warmup_fraction=0.0, clip_norm=None, muon_learning_rate=0.1)
    updates, grad = updates_of(config, params)
    adam = optax.nadam(config.learning_rate, config.beta1, config.beta2)
    expected, _ = jax.jit(lambda grad: adam.update(grad, adam.init(params), params))(grad)
    for (path, update), adams in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(expected), strict=True
    ):
        if path[-1].key in MATRICES:
            # Newton–Schulz takes singular values to about 1; scaled for rows ≠ columns.
            rows, columns = update.shape
            values = jnp.linalg.svd(update, compute_uv=False)
            values = values / 0.1 / max(1, columns / rows) ** 0.5
            assert 0.5 < float(values.max()) < 1.5, path
            assert float(jnp.median(values)) > 0.5, path
        else:
            np.testing.assert_allclose(update, adams, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_is_for_block_matrices(params, name):
    kinds = {"name": name, "warmup_fraction": 0.0, "clip_norm": None}
    params = jax.tree.map(jnp.ones_like, params)
    plain, grad = updates_of(OptimizerConfig(**kinds), params)
    decayed, _ = updates_of(OptimizerConfig(**kinds, weight_decay=0.5), params, grad)
    rate = 0.02 if name == "muon" else 3e-3
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(decayed), strict=True
    ):
        expected = 0.5 * rate if path[-1].key in MATRICES else 0.0
        np.testing.assert_allclose(a - b, expected, atol=1e-6, err_msg=str(path))


def test_clipping_is_of_the_whole_gradient(params):
    base = {"name": "adamw", "warmup_fraction": 0.0}
    small = jax.tree.map(lambda x: jnp.full(x.shape, 1e-8), params)
    large = jax.tree.map(lambda x: jnp.full(x.shape, 1e-2), params)
    clip = 1e-8 * float(optax.tree.norm(jax.tree.map(jnp.ones_like, params)))
    # Adam does not see the size of a gradient, but for its eps of 1e-8.
    clipped, _ = updates_of(OptimizerConfig(**base, clip_norm=clip), params, large)
    expected, _ = updates_of(OptimizerConfig(**base, clip_norm=None), params, small)
    free, _ = updates_of(OptimizerConfig(**base, clip_norm=None), params, large)
    for a, b, c in zip(*map(jax.tree.leaves, (clipped, expected, free)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
        assert abs(c).min() > 1.5 * abs(a).max()
