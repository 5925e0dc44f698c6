"""The formula in plain JAX: what XLA fuses as it likes, and what the kernels are held to.

Differentiated by JAX itself, in both modes and to any order.
"""

import jax
import jax.numpy as jnp

from .rope import Rope, cosine, sine, turned


def rms_norm(x, eps: float):
    """``x / sqrt(mean(x²) + eps)`` over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rotate(x, cos, sin, rope: Rope):
    """Turn the pairs of ``x [..., D]`` by their angles; ``cos, sin [..., rotary_dim/2]``."""
    turning, still = jnp.split(x, [rope.rotary_dim], axis=-1)
    if rope.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turning = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turning = turning.reshape(*still.shape[:-1], rope.rotary_dim)
    else:
        a, b = jnp.split(turning, 2, axis=-1)
        turning = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turning, still], axis=-1)


def qk_norm_rope(q, k, v, q_scale, k_scale, positions, *, norm_eps: float | None, rope: Rope):
    """As the public function, with ``positions`` given: int32 ``[S]`` or ``[B, S]``."""
    angle = turned(positions[..., None, None], *rope.steps)  # one for all heads
    cos, sin = cosine(angle), sine(angle)

    def prepare(x, scale):
        y = x.astype(jnp.float32)
        if norm_eps is not None:
            y = rms_norm(y, norm_eps)
        if scale is not None:
            y = y * scale.astype(jnp.float32)
        return jnp.swapaxes(rotate(y, cos, sin, rope).astype(x.dtype), 1, 2)

    return prepare(q, q_scale), prepare(k, k_scale), jnp.swapaxes(v, 1, 2)
