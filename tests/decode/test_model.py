"""A whole transformer, decoded: with absolute positions its full forward under the streaming mask,
with positions in the cache a forward that keeps and rotates what StreamingLLM says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti.decode import RingBuffer, attend
from smalti.preprocess import qk_norm_rope

from . import oracle

LAYERS, B, S, HQ, HKV, D, VOCABULARY = 3, 2, 45, 4, 2, 8, 11
WIDTH, SINKS, WINDOW = HQ * D, 2, 7
FACTOR = 4  # times the error of a plain float32 computation
POSITIONS = ("absolute", "cache")


@functools.cache
def weights():
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    layers = [
        {
            "q": matrix(WIDTH, HQ * D),
            "k": matrix(WIDTH, HKV * D),
            "v": matrix(WIDTH, HKV * D),
            "o": matrix(HQ * D, WIDTH),
            "up": matrix(WIDTH, 2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"tokens": matrix(VOCABULARY, WIDTH), "layers": layers}


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (B, S))


def forward(tokens, weights, attention, xp=jnp):
    """Logits ``[B, T, VOCABULARY]``; attention(n, q, k, v), of ``[B, T, H, D]``, is layer n's."""

    def normalised(x):
        return x / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    x = xp.asarray(weights["tokens"])[tokens]
    for n, w in enumerate(weights["layers"]):
        y = normalised(x)
        q, k, v = ((y @ w[name]).reshape(*tokens.shape, -1, D) for name in "qkv")
        x = x + attention(n, q, k, v).reshape(*tokens.shape, -1) @ w["o"]
        x = x + xp.maximum(normalised(x) @ w["up"], 0) @ w["down"]
    return normalised(x) @ weights["tokens"].T


@jax.jit
def full_forward(tokens):
    """With rotation by position and `smalti.attention` under the streaming mask."""

    def attention(n, q, k, v):
        q, k, v = qk_norm_rope(q, k, v, norm_eps=None)
        mask = smalti.masks.streaming(sinks=SINKS, window=WINDOW)
        return smalti.attention(q, k, v, mask=mask, layout="BHSD").swapaxes(1, 2)

    return forward(tokens, weights(), attention)


def decode(tokens, chunk: int, **options):
    """In chunks, with a cache for each layer."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(caches, tokens):
        caches = list(caches)

        def attention(n, q, k, v):
            out, caches[n] = attend(q, caches[n], k, v, **options)
            return out

        return forward(tokens, weights(), attention), caches

    empty = RingBuffer.empty(B, HKV, D, sinks=SINKS, window=WINDOW, dtype="float32")
    caches, logits = [empty] * LAYERS, []
    for start in range(0, S, chunk):
        out, caches = step(caches, tokens[:, start : start + chunk])
        logits.append(out)
    return np.concatenate(logits, axis=1)


@functools.cache
def by_definition(positions: str, dtype=np.float64):
    """With the oracle's attention: layer by layer every token sees what would be retained."""
    rules = oracle.Rules(SINKS, WINDOW, positions)

    def attention(n, q, k, v):
        return np.stack(
            [[x.out for x in oracle.sequence(q[b], k[b], v[b], rules, dtype)] for b in range(B)]
        )

    cast = jax.tree.map(lambda x: x.astype(dtype), weights())
    return forward(TOKENS, cast, attention, np)


def check(logits, positions: str):
    exact, plain = by_definition(positions), by_definition(positions, np.float32)
    assert plain.dtype == np.float32
    for position in np.split(np.arange(S), 5):
        usual = np.abs(plain[:, position] - exact[:, position]).max()
        assert np.abs(logits[:, position] - exact[:, position]).max() <= FACTOR * usual


@pytest.mark.parametrize("chunk", [1, 6, 45])
@pytest.mark.parametrize("positions", POSITIONS)
def test_decoding_is_the_models_definition(positions, chunk):
    check(decode(TOKENS, chunk, positions=positions), positions)


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
def test_decoding_by_the_kernels_is_the_models_definition(positions):
    options = {"implementation": "pallas", "interpret": True}
    check(decode(TOKENS, 5, positions=positions, **options), positions)


def test_the_full_forward_under_the_mask_is_the_same_model():
    check(np.asarray(full_forward(TOKENS)), "absolute")


def test_the_two_positions_differ_once_the_cache_is_full():
    a, b = by_definition("absolute"), by_definition("cache")
    full = SINKS + WINDOW
    np.testing.assert_allclose(a[:, :full], b[:, :full], rtol=1e-12)
    assert (np.abs(a - b)[:, full:].max(-1) > 1e-4).all()
