"""The Pallas kernels under reverse-mode differentiation."""

import functools

import jax
import jax.numpy as jnp

from .rope import cos_sin
from .tpu.backward import backward
from .tpu.forward import forward
from .tpu.tiles import Config


def qk_norm_rope(q, k, v, q_scale, k_scale, positions, *, rope_theta: float, config: Config):
    """As the public function, with ``positions`` given: ``[S]`` or ``[B, S]``."""
    D = q.shape[-1]
    # A product with 1 is exact, so a missing scale needs no kernel of its own.
    scales = (jnp.ones(D) if s is None else s for s in (q_scale, k_scale))
    arrays = (q, k, v, *scales, *cos_sin(positions, D, rope_theta))
    q, k, v, q_scale, k_scale, cos, sin = vary_alike(*arrays)
    q_scale, k_scale = q_scale.astype(jnp.float32), k_scale.astype(jnp.float32)
    return tuple(differentiable(config, q, k, v, q_scale, k_scale, cos, sin))


def vary_alike(*arrays):
    """Inside `shard_map`, let all vary over the mesh axes that any of them varies over.

    A kernel demands it; and what was shared between devices, as scales are, gets its gradient
    summed over them here, by the transpose of `pcast`.
    """
    axes = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*axes)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(arrays, axes, strict=True)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(config: Config, q, k, v, q_scale, k_scale, cos, sin):
    return forward(config, q, k, v, q_scale, k_scale, cos, sin)


def _forward_rule(config, q, k, v, q_scale, k_scale, cos, sin):
    out = forward(config, q, k, v, q_scale, k_scale, cos, sin)
    return out, (q, k, q_scale, k_scale, cos, sin)


def _backward_rule(config, residuals, cotangents):
    gradients = first_order_only(config, *residuals, *cotangents)
    # The angles come from integers, so nothing flows to them.
    return *gradients, None, None


differentiable.defvjp(_forward_rule, _backward_rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def first_order_only(config: Config, *arrays):
    """`backward`, in a form that JAX does not try to differentiate through the kernel."""
    return backward(config, *arrays)


def _refuse(config, *arrays):
    raise NotImplementedError(
        "qk_norm_rope: second derivatives were asked of implementation='pallas', which has "
        "gradients only. implementation='xla' has derivatives of any order: use it here."
    )


first_order_only.defvjp(_refuse, _refuse)
