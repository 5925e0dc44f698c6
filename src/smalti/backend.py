"""What a program will run on, and how precisely its products are to be computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from smalti.chips import find_chip


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


def kernel_precision(dtype) -> lax.Precision:
    """For a TPU kernel's products. What its compiler does not know, it does more precisely; and
    bfloat16 has one way, whatever the user chose for float32."""
    chosen = getattr(jax.config, "jax_default_matmul_precision", None)
    low = chosen in ("default", "fastest", "bfloat16")
    return lax.Precision.DEFAULT if low or dtype != jnp.float32 else lax.Precision.HIGHEST


def target_chip() -> str | None:
    """The chip's short name ("v6e"), from the mesh in context or the default backend; None where it
    is no TPU that is known."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        if jax.default_backend() != "tpu":
            return None
        device = jax.devices()[0]
    chip = find_chip(device.device_kind)
    return None if chip is None else chip.name.removeprefix("TPU ")
