"""What a program will run on, and how precisely its products are to be computed."""

from __future__ import annotations

import jax
from jax import lax


def target_platform() -> str:
    """ "cpu", "tpu" or "gpu": that of the mesh in context (a program may be lowered for a TPU on a
    machine without one), else the default backend's."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


def float32_precision() -> lax.Precision | None:
    """For float32 products: highest, unless the user chose by ``jax.default_matmul_precision``
    (None: what JAX reads from there)."""
    chosen = getattr(jax.config, "jax_default_matmul_precision", None)
    return None if chosen is not None else lax.Precision.HIGHEST
