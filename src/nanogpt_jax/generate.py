"""Tokens from a model, one by one: over a cache of what came before, or by one forward pass each.

The cache is as large after 20,000 tokens as it is after one, and a token takes as long. The forward
pass over the whole context is for the masks that no cache of first and last tokens can express.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanogpt_jax import model
from nanogpt_jax.attention import IMPL_SCOPE, PREPROCESS_SCOPE, AttentionChoice
from nanogpt_jax.cache import CacheSizes, cache_sizes
from nanogpt_jax.config import Config, SamplingConfig
from nanogpt_jax.model import Params
from nanogpt_jax.step import Forward
from smalti.decode import RingBuffer, attend

# Tokens of a prompt that are taken at once; the last ones are filled up to as many.
CHUNK = 128

Caches = tuple[RingBuffer, ...]


class Generator(NamedTuple):
    """tokens: (params, prompt [N], options) -> `options.num_tokens` tokens. description: a line
    for the log."""

    tokens: Callable[[Params, np.ndarray, SamplingConfig], Iterator[int]]
    description: str


def make_generator(config: Config, choice: AttentionChoice, forward: Forward) -> Generator:
    sizes = cache_sizes(config)
    if sizes is None:
        S = config.training.seq_len
        why = f"no cache of first and last tokens is {config.attention.mask_text}"
        tokens = functools.partial(_tokens_by_forward, recomputation(forward), S)
        return Generator(tokens, f"sampling: a forward pass over the last {S} tokens each; {why}")
    where = f", positions by {config.sampling.positions}" if sizes.sinks else ""
    description = f"sampling: smalti.decode, with a cache of {sizes}{where}"
    return Generator(
        functools.partial(_tokens_by_cache, Decoder(config, choice, sizes)), description
    )


def draw(logits, key, temperature, top_k) -> jax.Array:
    """int32: a token of ``logits [V]``; the likeliest one at temperature 0."""
    threshold = jnp.sort(logits)[::-1][top_k - 1]
    # Hidden after the division: that of −∞ by a great temperature is no number.
    scaled = logits / jnp.maximum(temperature, 1e-6)
    scaled = jnp.where((logits >= threshold) & (logits > -jnp.inf), scaled, -jnp.inf)
    return jnp.where(temperature > 0, jax.random.categorical(key, scaled), jnp.argmax(logits))


class Draws(NamedTuple):
    """What `draw` needs; all of it traced, so that no option compiles anything anew."""

    key: jax.Array
    temperature: float
    top_k: int

    @classmethod
    def of(cls, options: SamplingConfig, params: Params) -> "Draws":
        vocab_size = params["embedding"].shape[0]
        top_k = min(options.top_k or vocab_size, vocab_size)
        return cls(jax.random.key(options.seed), options.temperature, top_k)

    def __call__(self, logits, i) -> jax.Array:
        return draw(logits, jax.random.fold_in(self.key, i), self.temperature, self.top_k)


class Decoder:
    """Two programs: one that takes a chunk of a prompt, one that takes a token and draws the next.

    In both the new caches take the memory of those that are passed.
    """

    def __init__(self, config: Config, choice: AttentionChoice, sizes: CacheSizes):
        self.config, self.preprocess, self.sizes = config, choice.preprocess, sizes
        jit = functools.partial(jax.jit, donate_argnames="caches", static_argnames="by_place")
        self.take, self.step = jit(self._take), jit(self._step)

    def by_place(self, options: SamplingConfig) -> bool:
        """Whether keys and queries are turned by their places in the cache. Without sink tokens
        that is the same as by their positions: only differences count."""
        return options.positions == "cache" and self.sizes.sinks > 0

    def empty(self, params: Params) -> Caches:
        """One of each layer, where the parameters are."""
        cache = RingBuffer.empty(
            *(1, self.config.model.kv_heads, self.config.model.head_dim),
            sinks=self.sizes.sinks,
            window=self.sizes.window,
            dtype=jnp.dtype(self.config.training.dtype),
        )
        # Copies, for each is given away; and put there, or the second step would compile again.
        caches = tuple(jax.tree.map(jnp.copy, cache) for _ in params["blocks"])
        return jax.device_put(caches, params["embedding"].sharding)

    def prefill(self, params: Params, tokens: np.ndarray, *, by_place: bool) -> Caches:
        """The caches after ``tokens [N]``, N ≥ 0."""
        caches = self.empty(params)
        for start in range(0, len(tokens), CHUNK):
            chunk = np.zeros((1, CHUNK), np.int32)
            length = min(CHUNK, len(tokens) - start)
            chunk[0, :length] = tokens[start : start + length]
            caches = self.take(params, chunk, caches, np.array([length]), by_place=by_place)
        return caches

    def _take(self, params, tokens, caches: Caches, lengths, by_place: bool) -> Caches:
        return self._forward(params, tokens, caches, lengths, by_place)[1]

    def _step(self, params, token, caches: Caches, draws: Draws, i, by_place: bool):
        logits, caches = self._forward(params, token[None, None], caches, None, by_place)
        return draws(logits[0, 0], i).astype(token.dtype), caches

    def _forward(self, params, tokens, caches: Caches, lengths, by_place: bool):
        """Logits of ``tokens [1, T]``, which come after those in the caches, and the caches."""
        before, after = iter(caches), []

        def attention(q, k, v, q_scale, k_scale):  # `forward` calls it once for each layer, in turn
            cache = next(before)
            if by_place:  # `attend` turns q and k; at position 0 `preprocess` turns nothing
                where = {"positions": np.zeros(q.shape[1], np.int32)}
                rope = {"positions": "cache", "rope_theta": self.config.model.rope_theta}
            else:
                where, rope = {"position_offset": cache.length}, {}
            with jax.named_scope(PREPROCESS_SCOPE):
                q, k, v = self.preprocess(q, k, v, q_scale=q_scale, k_scale=k_scale, **where)
            with jax.named_scope(IMPL_SCOPE):
                out, cache = attend(q, cache, k, v, lengths=lengths, layout="BHSD", **rope)
            after.append(cache)
            return out

        logits = model.forward(
            params,
            tokens,
            config=self.config.model,
            attention=attention,
            dtype=jnp.dtype(self.config.training.dtype),
        )
        return logits, tuple(after)


def _tokens_by_cache(
    decoder: Decoder, params: Params, prompt: np.ndarray, options: SamplingConfig
) -> Iterator[int]:
    by_place = decoder.by_place(options)
    caches = decoder.prefill(params, prompt[:-1], by_place=by_place)
    token = jax.device_put(np.int32(prompt[-1]), params["embedding"].sharding)
    draws, shown = Draws.of(options, params), None
    for i in range(options.num_tokens):
        token, caches = decoder.step(params, token, caches, draws, i, by_place=by_place)
        # The device has its next token to work on before this one is waited for.
        if shown is not None:
            yield int(shown)
        shown = token
    if shown is not None:
        yield int(shown)


def recomputation(forward: Forward) -> Callable[..., jax.Array]:
    """(params, context [S], length, draws, i) -> the token after the first `length`."""

    @jax.jit
    def next_token(params, context, length, draws: Draws, i):
        return draws(forward(params, context[None])[0, length - 1], i)

    return next_token


def _tokens_by_forward(
    next_token, seq_len: int, params: Params, prompt: np.ndarray, options: SamplingConfig
) -> Iterator[int]:
    """Before the context of `seq_len` tokens is full, the rest of it is filled up with zeros behind
    the text, where causal attention does not look."""
    recent, draws = prompt[-seq_len:].tolist(), Draws.of(options, params)
    for i in range(options.num_tokens):
        context = np.zeros(seq_len, np.int32)
        context[: len(recent)] = recent
        token = int(next_token(params, context, len(recent), draws, i))
        recent = [*recent, token][-seq_len:]
        yield token
