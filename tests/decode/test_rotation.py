"""Two rotations of a query and one of each key are StreamingLLM's rotation by place."""

import jax.numpy as jnp
import numpy as np

from smalti.decode import RingBuffer
from smalti.decode.rotation import rotated_for
from smalti.preprocess.rope import Rope

from . import oracle


def test_scores_are_those_of_places_in_the_cache():
    S, K, W, D = 40, 3, 6, 8
    rules = oracle.Rules(K, W, "cache")
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 1, S, D)).astype(np.float32) for _ in range(2))
    cache = RingBuffer.empty(1, 1, D, sinks=K, window=W, dtype="float32")
    rope = Rope(head_dim=D, rotary_dim=D, theta=10_000.0, interleaved=False)
    turned = rotated_for(cache, jnp.asarray(q), jnp.asarray(k), rope, by_place=True)
    q_window, q_sinks, keys = (np.asarray(x)[0, 0] for x in turned)
    for i in range(S):
        kept = rules.retained(i)
        places = np.arange(len(kept))
        exact_q = oracle.rotated(q[0, 0, i][None, None].astype(float), places[-1:], rules)
        exact_k = oracle.rotated(k[0, 0, kept][:, None].astype(float), places, rules)
        expected = exact_k[:, 0] @ exact_q[0, 0]
        got = [(q_sinks if j < K else q_window)[i] @ keys[j] for j in kept]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_where_no_place_differs_nothing_is_rotated_twice():
    q = k = jnp.ones((1, 1, 2, 4))
    rope = Rope(head_dim=4, rotary_dim=4, theta=10_000.0, interleaved=False)
    for sinks, by_place in ((0, True), (2, False)):
        cache = RingBuffer.empty(1, 1, 4, sinks=sinks, window=3, dtype="float32")
        assert rotated_for(cache, q, k, rope, by_place=by_place)[1] is None


def test_far_tokens_are_rotated_as_precisely_as_near_ones():
    """Only differences count: at position 2 billion the scores of neighbours are those at 10."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 5, 64)), jnp.float32) for _ in range(2))
    rope = Rope(head_dim=64, rotary_dim=64, theta=10_000.0, interleaved=False)
    scores = []
    for length in (10, 2_000_000_000):
        cache = RingBuffer.empty(1, 1, 64, window=5, dtype="float32")
        cache = RingBuffer(cache.k, cache.v, jnp.array([length]), 0, 5)
        q_turned, _, k_turned = rotated_for(cache, q, k, rope, by_place=False)
        scores.append(np.asarray(q_turned[0, 0]) @ np.asarray(k_turned[0, 0]).T)
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=2e-5)
