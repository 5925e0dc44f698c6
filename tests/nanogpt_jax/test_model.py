"""The decoder: shapes, options, and that no token sees a later one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanogpt_jax.attention import make_attention
from nanogpt_jax.model import (
    count_params,
    cross_entropy,
    flops_per_token,
    forward,
    init_params,
    rms_norm,
)

from .conftest import tiny_config

VOCAB, SEQ = 11, 16
MASKS = ("attention.mask=streaming(sinks=2, window=5)",)
IMPLS = {
    "xla": ("attention.impl=xla",),
    "ours": ("attention.impl=ours",),
    "streaming": ("attention.impl=streaming", "attention.sink_tokens=2", "attention.window=5"),
    "flex": ("attention.impl=flex", *MASKS),
    "xla with a mask": ("attention.impl=xla", *MASKS),
}
RANDOM = "model.num_layers=2"


def random_params(config, seed=0):
    """As `init_params`, without its zeros, which would hide what a block does."""
    params = init_params(config.model, VOCAB, seed)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def compiled(config):
    attention = make_attention(config).attention
    options = {"config": config.model, "attention": attention, "remat": config.training.remat}
    dtype = jnp.dtype(config.training.dtype)
    return jax.jit(lambda params, tokens: forward(params, tokens, dtype=dtype, **options))


def logits_of(config, params, tokens):
    """Compiled once for each config."""
    return compiled(config)(params, tokens)


def tokens_of(seed=0, rows=2):
    return jax.random.randint(jax.random.key(seed), (rows, SEQ), 0, VOCAB)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_logits(tied, kv_heads, dtype):
    config = tiny_config(
        f"model.tie_embeddings={tied}",
        f"model.num_kv_heads={kv_heads}",
        f"training.dtype={dtype}",
    )
    params = init_params(config.model, VOCAB, 0)
    logits = logits_of(config, params, tokens_of())
    assert logits.shape == (2, SEQ, VOCAB)
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert ("head" in params) == (tied == "false")
    assert params["blocks"][0]["attention"]["k"].shape == (16, kv_heads * 8)


def test_a_new_model_knows_nothing():
    """Untied, the head starts at zero: the loss is that of guessing, exactly."""
    config = tiny_config()
    logits = logits_of(config, init_params(config.model, VOCAB, 0), tokens_of())
    np.testing.assert_allclose(cross_entropy(logits, tokens_of(1)), np.log(VOCAB), rtol=1e-6)


def test_a_tied_head_is_the_embedding():
    config = tiny_config("model.tie_embeddings=true")
    params = random_params(config)
    params["embedding"] = params["embedding"].at[3].multiply(2.0)
    tokens = jnp.where(tokens_of() == 3, 4, tokens_of())  # 3 is never an input
    before = logits_of(config, random_params(config), tokens)
    after = logits_of(config, params, tokens)
    np.testing.assert_allclose(after[..., 3], 2 * before[..., 3], rtol=1e-5)
    np.testing.assert_array_equal(after[..., 4], before[..., 4])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("position", [0, 7, SEQ - 1])
def test_a_token_changes_nothing_before_it(impl, position):
    config = tiny_config(RANDOM, *IMPLS[impl])
    params, tokens = random_params(config), tokens_of()
    changed = tokens.at[:, position].set((tokens[:, position] + 1) % VOCAB)
    before, after = (logits_of(config, params, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(axis=-1)[:, 0].all()


def test_grouped_heads_equal_repeated_ones():
    """GQA is attention with each key head copied to its query heads."""
    grouped, full = tiny_config(), tiny_config("model.num_kv_heads=2")
    params = random_params(grouped)
    copied = random_params(grouped)
    for name in ("k", "v"):
        weight = copied["blocks"][0]["attention"][name]
        copied["blocks"][0]["attention"][name] = jnp.concatenate([weight, weight], axis=1)
    np.testing.assert_allclose(
        logits_of(grouped, params, tokens_of()), logits_of(full, copied, tokens_of()), atol=1e-5
    )


def test_remat_changes_nothing_but_memory():
    plain, remat = tiny_config(RANDOM), tiny_config(RANDOM, "training.remat=true")
    params = random_params(plain)

    tokens = tokens_of()

    def grad_of(config):
        run = compiled(config)
        return jax.jit(jax.grad(lambda p: run(p, tokens).sum()))

    for a, b in zip(
        jax.tree.leaves(grad_of(plain)(params)),
        jax.tree.leaves(grad_of(remat)(params)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    recomputed = grad_of(remat).lower(params).as_text()
    assert recomputed.count("optimization_barrier") > 0
    assert grad_of(plain).lower(params).as_text().count("optimization_barrier") == 0


def test_cross_entropy_is_that_of_log_softmax():
    logits = 5 * jax.random.normal(jax.random.key(0), (2, SEQ, VOCAB))
    targets = tokens_of(3)
    expected = -np.log(
        np.take_along_axis(np.asarray(jax.nn.softmax(logits)), np.asarray(targets)[..., None], -1)
    )[..., 0]
    np.testing.assert_allclose(cross_entropy(logits, targets), expected, rtol=1e-5, atol=2e-6)


def test_rms_norm_has_unit_rows_and_the_dtype_of_x():
    x = jax.random.normal(jax.random.key(0), (3, 64), jnp.bfloat16) * 7
    y = rms_norm(x, 1.0, 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.mean(np.square(np.float32(y)), -1), 1.0, rtol=0.02)


def test_flops_count_each_matrix_and_the_visible_keys():
    config = tiny_config().model
    params = init_params(config, VOCAB, 0)
    looked_up = params["embedding"].size + 3 * 16 + 2 * 8  # and the norms' scales
    matrices = count_params(params) - looked_up
    visible = 5.5
    expected = 6 * matrices + 12 * config.num_heads * config.head_dim * visible
    assert flops_per_token(config, VOCAB, visible) == expected
