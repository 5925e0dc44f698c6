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
from .test_model import RANDOM, SEQ, VOCAB, random_params

STREAMING = ("attention.impl=streaming", "attention.sink_tokens=2", "attention.window=5")
# Each with the mask of a full forward pass that shows the same, over any number of tokens.
CACHED = {
    "ours": (("attention.impl=ours",), f"sliding_window({SEQ})"),
    "xla": ((), f"sliding_window({SEQ})"),
    "a window": (("attention.mask=sliding_window(6)",), "sliding_window(6)"),
    "flex": (
        ("attention.impl=flex", "attention.mask=streaming(sinks=1, window=4)"),
        "streaming(sinks=1, window=4)",
    ),
    "streaming": (STREAMING, "streaming(sinks=2, window=5)"),
    "pallas preprocess": (("attention.preprocess=pallas",), f"sliding_window({SEQ})"),
}
PROMPT = np.arange(7, dtype=np.uint16) % VOCAB


@functools.cache
def generator_of(config):
    choice = make_attention(config)
    return make_generator(config, choice, make_forward(config, choice.attention))


def tokens_of(config, prompt, num_tokens, params=None, **options):
    """Prompt and what was written."""
    options = SamplingConfig(num_tokens=num_tokens, **{"temperature": 0.0, **options})
    params = random_params(config) if params is None else params
    return np.array([*prompt, *generator_of(config).tokens(params, prompt, options)])


def assert_likeliest(tokens, logits, prompt):
    """What was written after the prompt is what ``logits [S, V]`` of all of it say."""
    written, wanted = tokens[len(prompt) :], np.argmax(logits, -1)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(written, wanted)
    assert len(set(written.tolist())) > 2, "a text of one letter would show little"


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", CACHED)
def test_a_greedy_text_is_that_of_full_forward_passes(name, kv_heads):
    """Far beyond training.seq_len; the forward pass over all of it sees each token's past."""
    overrides, mask = CACHED[name]
    shape = (RANDOM, f"model.num_kv_heads={kv_heads}")
    config = tiny_config(*shape, *overrides)
    tokens = tokens_of(config, PROMPT, 60, positions="absolute")

    full = tiny_config(*shape, f"attention.mask={mask}", f"training.seq_len={len(tokens)}")
    run = jax.jit(make_forward(full, make_attention(full).attention))
    assert_likeliest(tokens, run(random_params(config), tokens[None])[0], PROMPT)


@pytest.mark.parametrize("length", [1, 2, SEQ, generate.CHUNK + 1, generate.CHUNK + 22])
@pytest.mark.parametrize("name", ["ours", "streaming"])
def test_prompts_of_any_length(name, length):
    overrides, mask = CACHED[name]
    config = tiny_config(RANDOM, *overrides)
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.uint16)
    tokens = tokens_of(config, prompt, 12, positions="absolute")
    full = tiny_config(RANDOM, f"attention.mask={mask}", f"training.seq_len={len(tokens)}")
    run = jax.jit(make_forward(full, make_attention(full).attention))
    logits = run(random_params(config), tokens[None])[0]
    np.testing.assert_array_equal(tokens[length:], np.argmax(logits, -1)[length - 1 : -1])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_positions_by_cache_are_those_of_the_paper(kv_heads):
    """All layers, with attention as StreamingLLM describes it, token by token over a list of keys
    that are turned anew for each."""
    config = tiny_config(RANDOM, *STREAMING, f"model.num_kv_heads={kv_heads}")
    params = random_params(config)
    tokens = tokens_of(config, PROMPT, 40)
    rules = oracle.Rules(2, 5, "cache", rope_theta=config.model.rope_theta)

    def attention(q, k, v, q_scale, k_scale):
        q, k = rms_norm(q, q_scale, 1e-6), rms_norm(k, k_scale, 1e-6)
        rows = oracle.sequence(*(np.asarray(x[0]) for x in (q, k, v)), rules, np.float32)
        return jnp.asarray(np.stack([row.out for row in rows], 1)[None])

    logits = forward(params, jnp.asarray(tokens[None]), config=config.model, attention=attention)
    assert_likeliest(tokens, logits[0], PROMPT)
    assert not np.array_equal(tokens, tokens_of(config, PROMPT, 40, positions="absolute"))


def test_bfloat16_caches_take_half_the_memory():
    config = tiny_config(RANDOM, *STREAMING, "training.dtype=bfloat16")
    choice, params = make_attention(config), random_params(config)
    caches = Decoder(config, choice, CacheSizes(2, 5)).empty(params)
    assert {x.dtype for cache in caches for x in (cache.k, cache.v)} == {jnp.dtype("bfloat16")}
    assert len(tokens_of(config, PROMPT, 20)) == 27


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
    params, run = random_params(config), make_forward(config, make_attention(config).attention)
    tokens = tokens_of(config, PROMPT, SEQ - 7)
    assert_likeliest(tokens, run(params, tokens[None])[0], PROMPT)
    # The context is full now: the last 16 tokens are the whole of it.
    longer = tokens_of(config, PROMPT, SEQ)
    for end in range(SEQ, len(longer)):
        logits = run(params, longer[None, end - SEQ : end])
        assert longer[end] == logits[0, -1].argmax()


def test_what_runs_is_said():
    said = {
        name: generator_of(tiny_config(RANDOM, *CACHED[name][0])).description for name in CACHED
    }
    assert said["ours"] == "sampling: smalti.decode, with a cache of the last 16 tokens"
    assert said["streaming"] == (
        "sampling: smalti.decode, with a cache of the first 2 and the last 5 tokens, positions by "
        "cache"
    )
