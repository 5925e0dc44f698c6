"""RoPE by position in the cache, as StreamingLLM defines it, without turning a key twice.

StreamingLLM (arXiv:2309.17453, section 3.2) turns every key by its place in the cache, the sink
tokens first and then the window by age, and the query by the last place. In RoPE only differences
of positions count. Within the window these are the same as of positions in the sequence; from a
sink token to the query the difference is what it would be if the sequence had just filled the
cache. So keys are turned once, by their positions in the sequence, before they are cached; and a
query is turned twice: by its position for the keys of the window, and by its place in the cache,
``min(position, sinks + window − 1)``, for the sink tokens. That holds for each query of a chunk.
"""

from __future__ import annotations

import jax.numpy as jnp

from smalti.preprocess.reference import rotate
from smalti.preprocess.rope import Rope, cosine, sine, turned

from .ring_buffer import RingBuffer


def rotated(x, positions, rope: Rope):
    """``x [B, H, T, D]`` turned by ``positions`` int32 ``[B, T]``, in float32 and rounded once."""
    whole, rest = (steps[None, None, None] for steps in rope.steps)
    angle = turned(positions[:, None, :, None], whole, rest)
    return rotate(x.astype(jnp.float32), cosine(angle), sine(angle), rope).astype(x.dtype)


def rotated_for(cache: RingBuffer, q, k, rope: Rope, *, by_place: bool):
    """Queries, queries for the sink tokens (None: the same), and keys of tokens to be appended."""
    t = jnp.arange(q.shape[2], dtype=jnp.int32)
    position = cache.length[:, None] + t[None]
    place = jnp.minimum(position, cache.slots - 1)
    q_sinks = rotated(q, place, rope) if by_place and cache.sinks else None
    return rotated(q, position, rope), q_sinks, rotated(k, position, rope)
