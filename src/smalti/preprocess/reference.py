"""The formula in plain JAX: what XLA fuses as it likes, and what the kernels are held to.

Differentiated by JAX itself, in both modes and to any order.
"""

import jax
import jax.numpy as jnp

from .rope import cos_sin


def rms_norm(x, scale, eps: float):
    """``x / sqrt(mean(x²) + eps) · scale`` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if scale is None else x * scale.astype(jnp.float32)


def rotate_half_split(x, cos, sin):
    """Turn the pair ``(x[i], x[i + D/2])`` by its angle; ``cos, sin [..., D/2]``."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def qk_norm_rope(q, k, v, q_scale, k_scale, positions, *, norm_eps: float, rope_theta: float):
    """As the public function, with ``positions`` given: ``[S]`` or ``[B, S]``."""
    cos, sin = cos_sin(positions, q.shape[-1], rope_theta)
    cos, sin = cos[..., None, :], sin[..., None, :]  # one angle for all heads

    def prepare(x, scale):
        rotated = rotate_half_split(rms_norm(x, scale, norm_eps), cos, sin)
        return jnp.swapaxes(rotated.astype(x.dtype), 1, 2)

    return prepare(q, q_scale), prepare(k, k_scale), jnp.swapaxes(v, 1, 2)
