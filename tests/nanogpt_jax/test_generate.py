"""Tokens by cache: those that whole forward passes give, in constant memory and two programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanogpt_jax import generate
from nanogpt_jax.attention import make_attention
from nanogpt_jax.cache import CacheSizes
from nanogpt_jax.config import SamplingConfig
from nanogpt_jax.generate import Decoder, make_generator
from nanogpt_jax.model import forward, rms_norm
from nanogpt_jax.sample import make_forward
from tests.decode import oracle

from .conftest import tiny_config
from .test_model import RANDOM, SEQ, VOCAB, compiled, random_params

STREAMING = ("attention.impl=streaming", "attention.sink_tokens=2", "attention.window=5")
# Each with the mask of a full forward pass that shows the same, over any number of tokens.
CACHED = {
    "ours": (("attention.impl=ours",), f"sliding_window({SEQ})"),
    "no groups": (("model.num_kv_heads=2",), f"sliding_window({SEQ})"),
    "a window": (("attention.mask=sliding_window(6)",), "sliding_window(6)"),
    "flex": (
        ("attention.impl=flex", "attention.mask=streaming(sinks=1, window=4)"),
        "streaming(sinks=1, window=4)",
    ),
    "streaming": (STREAMING, "streaming(sinks=2, window=5)"),
    "pallas preprocess": (("attention.preprocess=pallas",), f"sliding_window({SEQ})"),
}
PROMPT = np.arange(7, dtype=np.uint16) % VOCAB
LONGEST = generate.CHUNK + 40


@functools.cache
def generator_of(config):
    choice = make_attention(config)
    return make_generator(config, choice, make_forward(config, choice.attention))


def written(config, prompt, num_tokens, **options):
    """Prompt and what was written, uint16 [N], and the options."""
    chosen = SamplingConfig(num_tokens=num_tokens, **options)
    tokens = generator_of(config).tokens(random_params(config), prompt, chosen)
    return np.array([*prompt, *tokens], np.uint16), chosen


def assert_drawn_from(logits, tokens, prompt, options):
    """What was written after the prompt is what ``logits [S, V]`` of all of it say."""
    draws = generate.Draws(jax.random.key(options.seed), options.temperature, VOCAB)
    used = logits[len(prompt) - 1 : len(tokens) - 1]
    expected = jax.vmap(draws)(used, jnp.arange(len(used)))
    np.testing.assert_array_equal(tokens[len(prompt) :], expected)


@functools.cache
def full_forward(config, mask):
    """(tokens [N]) -> logits of one forward pass over all of them, N ≤ LONGEST."""
    longer = f"attention.mask={mask}", f"training.seq_len={LONGEST}"
    shape = RANDOM, f"model.num_kv_heads={config.model.kv_heads}"
    full = tiny_config(*shape, *longer)
    run = jax.jit(make_forward(full, make_attention(full).attention))
    params = random_params(config)
    return lambda tokens: run(params, np.pad(tokens, (0, LONGEST - len(tokens)))[None])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CACHED)
def test_a_text_is_that_of_full_forward_passes(name, temperature):
    """Far beyond training.seq_len; the forward pass over all of it sees each token's past. Greedy
    text may go around in circles, so that text is drawn as well."""
    overrides, mask = CACHED[name]
    config = tiny_config(RANDOM, *overrides)
    tokens, options = written(config, PROMPT, 60, temperature=temperature, positions="absolute")
    assert_drawn_from(full_forward(config, mask)(tokens), tokens, PROMPT, options)
    assert len(set(tokens[7:].tolist())) >= (7 if temperature else 2)


@pytest.mark.parametrize("length", [1, 2, SEQ, generate.CHUNK + 1, generate.CHUNK + 22])
@pytest.mark.parametrize("name", ["ours", "streaming"])
def test_prompts_of_any_length(name, length):
    overrides, mask = CACHED[name]
    config = tiny_config(RANDOM, *overrides)
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.uint16)
    tokens, options = written(config, prompt, 12, temperature=1.0, positions="absolute")
    assert_drawn_from(full_forward(config, mask)(tokens), tokens, prompt, options)


@pytest.mark.parametrize("heads", [(), ("model.num_kv_heads=2",)], ids=["groups", "no groups"])
def test_positions_by_cache_are_those_of_the_paper(heads):
    """All layers, with attention as StreamingLLM describes it, token by token over a list of keys
    that are turned anew for each."""
    config = tiny_config(RANDOM, *STREAMING, *heads)
    tokens, options = written(config, PROMPT, 40, temperature=1.0)
    rules = oracle.Rules(2, 5, "cache", rope_theta=config.model.rope_theta)

    def attention(q, k, v, q_scale, k_scale):
        q, k = rms_norm(q, q_scale, 1e-6), rms_norm(k, k_scale, 1e-6)
        rows = oracle.sequence(*(np.asarray(x[0]) for x in (q, k, v)), rules, np.float32)
        return jnp.asarray(np.stack([row.out for row in rows], 1)[None])

    logits = forward(
        random_params(config),
        jnp.asarray(tokens[None].astype(np.int32)),
        config=config.model,
        attention=attention,
    )
    assert_drawn_from(logits[0], tokens, PROMPT, options)
    absolute, _ = written(config, PROMPT, 40, temperature=1.0, positions="absolute")
    assert not np.array_equal(tokens, absolute)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1.0, 1e38, 1e39, 1e300, np.inf])
def test_a_temperature_leaves_the_likeliest_as_they_are(temperature):
    """Also where a quotient by it is nothing, or of −∞ no number."""
    logits, likeliest = jnp.array([0.0, 1.0, 5.0, 2.0, -jnp.inf]), [2, 3, 1, 0]
    keys = jax.random.split(jax.random.key(0), 200)
    float32 = jnp.float32(temperature if temperature < 1e39 else np.inf)
    assert generate.draw(logits, keys[0], temperature, 1) == 2
    assert jax.jit(generate.draw)(logits, keys[0], float32, 1) == 2
    for top_k in (2, 4, 5):
        draws = jax.jit(jax.vmap(generate.draw, (None, 0, None, None)))
        drawn = draws(logits, keys, float32, top_k)
        expected = likeliest[: min(top_k, 4) if temperature > 1 else None]
        assert set(drawn.tolist()) <= set(expected)
        if temperature > 1e30:  # all that may be drawn are as likely
            assert set(drawn.tolist()) == set(expected)


def test_bfloat16_caches_take_half_the_memory():
    config = tiny_config(RANDOM, *STREAMING, "training.dtype=bfloat16")
    choice, params = make_attention(config), random_params(config)
    caches = Decoder(config, choice, CacheSizes(2, 5)).empty(params)
    assert {x.dtype for cache in caches for x in (cache.k, cache.v)} == {jnp.dtype("bfloat16")}
    assert len(written(config, PROMPT, 20)[0]) == 27


def test_memory_and_programs_do_not_grow():
    config = tiny_config(RANDOM, *STREAMING)
    traces = []
    choice = make_attention(config)

    def counting(q, k, v, **how):
        traces.append(q.shape[1])
        return choice.preprocess(q, k, v, **how)

    decoder = Decoder(config, dataclasses.replace(choice, preprocess=counting), CacheSizes(2, 5))
    params, sizes = random_params(config), set()
    caches = decoder.prefill(params, np.zeros(300, np.uint16), by_place=True)
    token = jax.device_put(np.int32(0), params["embedding"].sharding)
    for i in range(200):
        options = SamplingConfig(temperature=i % 3, top_k=1 + i % 5, seed=i)
        before = jax.tree.leaves(caches)
        draws = generate.Draws.of(options, params)
        token, caches = decoder.step(params, token, caches, draws, i, by_place=True)
        sizes.add(sum(x.nbytes for x in jax.tree.leaves(caches)))
        assert all(x.is_deleted() for x in before), "the new caches take the memory of the old"
    assert int(caches[0].length[0]) == 500
    assert len(sizes) == 1
    layers = 2
    assert traces == [generate.CHUNK] * layers + [1] * layers
    assert decoder.step._cache_size() == 1
    assert decoder.take._cache_size() == 1


def test_a_mask_that_no_cache_expresses_is_recomputed():
    mask = "document(lengths=[10, 6]) & causal()"
    config = tiny_config(RANDOM, "attention.impl=flex", f"attention.mask={mask}")
    assert generator_of(config).description == (
        "sampling: a forward pass over the last 16 tokens each; no cache of first and last tokens "
        f"is {mask}"
    )
    params, run = random_params(config), compiled(config)
    tokens, options = written(config, PROMPT, 2 * SEQ, temperature=1.0)
    # Each by the last 16 tokens, once there are so many.
    logits = []
    for end in range(1, len(tokens)):
        context = tokens[max(0, end - SEQ) : end]
        padded = np.pad(context, (0, SEQ - len(context)), constant_values=7)
        logits.append(run(params, padded[None])[0, len(context) - 1])
    assert_drawn_from(jnp.stack(logits), tokens, PROMPT, options)


def test_what_runs_is_said():
    said = {
        name: generator_of(tiny_config(RANDOM, *CACHED[name][0])).description for name in CACHED
    }
    assert said["ours"] == "sampling: smalti.decode, with a cache of the last 16 tokens"
    assert said["streaming"] == (
        "sampling: smalti.decode, with a cache of the first 2 and the last 5 tokens, positions by "
        "cache"
    )
