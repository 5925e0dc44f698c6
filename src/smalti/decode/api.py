"""The public functions: check, choose an implementation, attend, write the cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from smalti.backend import target_platform
from smalti.varying import vary_over, varying_axes

from . import validation
from .reference import reference, reference_of_written
from .ring_buffer import RingBuffer
from .rotation import rotated_for
from .tpu.forward import forward
from .tpu.transformations import transformable
from .tpu.write import written

# Tokens that the XLA path takes at once: with more of them its scores, [B, Hq, tokens, slots], are
# large, with fewer its products are small.
PIECE = 128


def attend(
    q,
    cache: RingBuffer,
    k,
    v,
    *,
    lengths=None,
    positions: str | None = None,
    rope_theta: float | None = None,
    rope_interleaved: bool = False,
    rotary_dim: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "BSHD",
    implementation: str | None = None,
    interpret=None,
) -> tuple[jax.Array, RingBuffer]:
    """Attention of new tokens over a cache and themselves; the cache with the new tokens.

    Token by token, or a prompt in chunks of any size, which give the same but for rounding:

        cache = RingBuffer.empty(B, Hkv, D, sinks=4, window=1020, dtype=q.dtype)
        out, cache = attend(q, cache, k, v)    # q [B, T, Hq, D], k and v [B, T, Hkv, D]

    The query at position ``i`` of its sequence sees what ``smalti.masks.streaming(sinks=K,
    window=W)`` says: the keys ``j < K`` and ``i − W < j ≤ i``, itself included, of the cache and of
    the chunk; also those that the chunk pushes out of the cache.

    Args:
      q: ``[B, T, Hq, D]``, float32, bfloat16 or float16: the queries of T new tokens.
      cache: what came before. It is not changed; under `jax.jit` with ``donate_argnums`` the new
        one takes its memory.
      k, v: ``[B, T, Hkv, D]`` and ``[B, T, Hkv, Dv]``, their keys and values. Hq is a multiple of
        Hkv.
      lengths: int ``[B]``, how many of the T tokens are real in each sequence, the first ones; may
        be traced, and 0. None for all. The rest is padding: its results are 0, and it leaves no
        trace in the cache.
      positions: what RoPE turns q and k by before anything else. None: nothing turns them here,
        for the model has no RoPE or turns them itself, by ``cache.length`` and on
        (`smalti.preprocess.qk_norm_rope` takes it as ``position_offset``).
        ``"absolute"``: by their positions in the sequence. ``"cache"``: by their places in the
        cache, as StreamingLLM (arXiv:2309.17453) does: the sink tokens first, then the window by
        age, the query last; no distance exceeds the cache, however long the sequence is.
      rope_theta, rope_interleaved, rotary_dim: as in `smalti.preprocess.qk_norm_rope`; theta is
        10,000 unless given.
      scale: a Python float; ``1/sqrt(D)`` by default.
      softcap: ``softcap · tanh(score / softcap)``; a positive Python float.
      layout: "BSHD" as above, or "BHSD": q ``[B, Hq, T, D]`` and so on, the result too.
      implementation: "reference" (plain JAX), "pallas" (a TPU kernel for up to 8 new tokens, of
        float32 or bfloat16, that passes by blocks of the cache without a token), or None: "pallas"
        on a TPU where it can, else "reference". The platform is that of the mesh in context
        (`jax.set_mesh`), else the default backend. A named one is used or raises.
      interpret: for "pallas": True, or a ``pltpu.InterpretParams``, runs the kernel in an
        interpreter, on any platform and slowly.

    Returns:
      ``out [B, T, Hq, Dv]`` in q's dtype, and the cache with the new tokens.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says which and what to do.
      NotImplementedError: the named implementation cannot do what is asked.

    Scores, softmax and sums are float32. Shapes do not depend on how much was generated: one
    program serves all steps. "reference" has derivatives; "pallas" has none, and says so.
    """
    validation.check_cache(cache)
    q, k, v = (
        validation.heads_first(name, x, cache, layout) for name, x in (("q", q), ("k", k), ("v", v))
    )
    validation.check_new(k, v, cache)
    validation.check_query(q, k)
    B, _, T, D = q.shape
    lengths = validation.checked_lengths(lengths, B, T)
    rope = validation.checked_rope(positions, rope_theta, rope_interleaved, rotary_dim, D)
    scale = D**-0.5 if scale is None else validation.checked_number("scale", scale, positive=False)
    if softcap is not None:
        softcap = validation.checked_number("softcap", softcap, positive=True)
    chosen = validation.checked_implementation(
        implementation, interpret, T=T, dtype=q.dtype, platform=target_platform()
    )

    # A compiled program still says by this name what ran.
    with jax.named_scope(f"smalti.decode.attend[{chosen}]"):
        q_sinks = None
        if rope is not None:
            q, q_sinks, k = rotated_for(cache, q, k, rope, by_place=positions == "cache")
        options = {"scale": scale, "softcap": softcap}
        read, write = functools.partial(reference, **options), RingBuffer.written
        if chosen == "pallas":
            how = {"interpret": interpret or False}
            read = transformable(functools.partial(forward, **options, **how))
            write = transformable(functools.partial(written, **how))
        step = functools.partial(_step, read, write)
        if chosen == "reference" and T == 1:
            step = functools.partial(
                _write_first, functools.partial(reference_of_written, **options)
            )
        out, cache = _in_pieces(step, cache, q, q_sinks, k, v, lengths)
    return (out.swapaxes(1, 2) if layout == "BSHD" else out), cache


def append(cache: RingBuffer, k, v, *, lengths=None, layout: str = "BSHD") -> RingBuffer:
    """The cache with more tokens, of which nothing is asked: after a prompt, say, whose attention
    was ``smalti.attention(q, k, v, mask=smalti.masks.streaming(…))``.

    Args:
      k: ``[B, T, Hkv, D]``, as attention multiplies them: in a model with RoPE turned by their
        positions in the sequence, whichever ``positions`` later calls of `attend` have.
      v, lengths, layout: as in `attend`.
    """
    validation.check_cache(cache)
    k, v = (validation.heads_first(name, x, cache, layout) for name, x in (("k", k), ("v", v)))
    validation.check_new(k, v, cache)
    return cache.written(k, v, validation.checked_lengths(lengths, k.shape[0], k.shape[2]))


def _in_pieces(step, cache: RingBuffer, q, q_sinks, k, v, lengths):
    """The tokens by `PIECE` at most: a chunk is the same as its pieces, one after the other."""
    arrays = q, q_sinks, k, v
    T = q.shape[2]
    pieces = -(-T // PIECE)
    if pieces == 1:
        return step(cache, *arrays, lengths)
    size = -(-T // pieces)

    def cut(x):  # [B, H, T, D] to [pieces, B, H, size, D]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pieces * size - T), (0, 0)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], pieces, size, x.shape[3]), 2, 0)

    def body(cache, piece):
        start, *arrays = piece
        out, cache = step(cache, *arrays, jnp.clip(lengths - start, 0, size))
        return cache, out

    starts = jnp.arange(pieces, dtype=jnp.int32) * size
    cache = vary_over(cache, varying_axes((cache, arrays, lengths)))
    cache, out = lax.scan(body, cache, (starts, *jax.tree.map(cut, arrays)))
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], pieces * size, -1)[:, :, :T], cache


def _step(read, write, cache: RingBuffer, q, q_sinks, k, v, lengths):
    out = read(q, q_sinks, cache, k, v, lengths)
    # What reads the old cache comes before what writes the new one, so that these can be one
    # memory: without this XLA copies the whole of it.
    out, rows = lax.optimization_barrier((out, (cache.k, cache.v)))
    cache = dataclasses.replace(cache, k=rows[0], v=rows[1])
    return out, write(cache, k, v, lengths)


def _write_first(read, cache: RingBuffer, q, q_sinks, k, v, lengths):
    cache = cache.written(k, v, lengths)
    return read(q, q_sinks, cache, lengths), cache
