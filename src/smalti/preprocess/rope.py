"""The angles of rotary position embedding (RoPE, arXiv:2104.09864)."""

import jax
import jax.numpy as jnp
import numpy as np


def cos_sin(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of ``positions · theta^(−2i/D)``, ``i < D/2``.

    ``positions`` is integer ``[..., S]``; both results are float32 ``[..., S, D/2]``.
    """
    # The frequencies are constants, so they are rounded to float32 once, from float64.
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = positions.astype(jnp.float32)[..., None] * frequency.astype(np.float32)
    return jnp.cos(angle), jnp.sin(angle)
