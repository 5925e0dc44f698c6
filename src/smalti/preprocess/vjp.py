"""The Pallas kernels under reverse-mode differentiation."""

import functools

import jax
import jax.numpy as jnp

from smalti.first_order import first_order
from smalti.varying import vary_over, varying_axes

from .tpu.backward import backward
from .tpu.forward import forward
from .tpu.tiles import Config


def qk_norm_rope(q, k, v, q_scale, k_scale, positions, *, config: Config):
    """As the public function, with ``positions`` given: int32 ``[S]`` or ``[B, S]``."""
    D = q.shape[-1]
    # A product with 1 is exact, so a missing scale needs no kernel of its own.
    # In float32 before anything is shared, so that gradients add up over devices in float32 too.
    scales = (
        jnp.ones(D, jnp.float32) if s is None else s.astype(jnp.float32) for s in (q_scale, k_scale)
    )
    arrays = (q, k, v, *scales, positions)
    # A kernel's operands vary over the same axes of a mesh. What the devices share, as they do
    # scales, gets its gradient summed over them here, by the transpose of the cast.
    return tuple(differentiable(config, *vary_over(arrays, varying_axes(arrays))))


def _first_order(kernel, config):
    name = "smalti.preprocess.qk_norm_rope: implementation 'pallas'"
    return first_order(functools.partial(kernel, config), name, instead="xla")


def _forward_rule(config, q, k, v, q_scale, k_scale, positions):
    out = _first_order(forward, config)(q, k, v, q_scale, k_scale, positions)
    return out, (q, k, q_scale, k_scale, positions)


def _backward_rule(config, residuals, cotangents):
    dq, dk, dv, dq_scale, dk_scale = _first_order(backward, config)(*residuals, *cotangents)
    return dq, dk, dv, dq_scale, dk_scale, None  # positions are integers


differentiable = jax.custom_vjp(forward, nondiff_argnums=(0,))
differentiable.defvjp(_forward_rule, _backward_rule)
