"""The Pallas kernels under reverse-mode differentiation."""

import jax
import jax.numpy as jnp

from smalti.varying import vary_over, varying_axes

from .rope import cos_sin
from .tpu.backward import backward
from .tpu.forward import forward
from .tpu.tiles import Config


def qk_norm_rope(q, k, v, q_scale, k_scale, positions, *, rope_theta: float, config: Config):
    """As the public function, with ``positions`` given: ``[S]`` or ``[B, S]``."""
    D = q.shape[-1]
    # A product with 1 is exact, so a missing scale needs no kernel of its own.
    # In float32 before anything is shared, so that gradients add up over devices in float32 too.
    scales = (
        jnp.ones(D, jnp.float32) if s is None else s.astype(jnp.float32) for s in (q_scale, k_scale)
    )
    arrays = (q, k, v, *scales, *cos_sin(positions, D, rope_theta))
    # A kernel's operands vary over the same axes of a mesh. What the devices share, as they do
    # scales, gets its gradient summed over them here, by the transpose of the cast.
    axes = varying_axes(arrays)
    if config.interpret is True and axes:
        raise NotImplementedError(
            "interpret: got True inside shard_map, where JAX's interpreter fails under the default "
            "checks: it does not see that a kernel's constants may meet values that vary over the "
            "mesh. Pass check_vma=False to shard_map, or interpret=pltpu.InterpretParams() on a "
            "mesh of one device; compiled for a TPU the kernels pass the checks."
        )
    return tuple(differentiable(config, *vary_over(arrays, axes)))


def once(kernel):
    """A kernel inside a rule of differentiation: differentiated again, it refuses.

    JAX would otherwise try to differentiate what is inside the kernel, and fail obscurely.
    """
    guarded = jax.custom_vjp(kernel, nondiff_argnums=(0,))
    guarded.defvjp(_refuse, _refuse)
    return guarded


def _refuse(config, *arrays):
    raise NotImplementedError(
        "qk_norm_rope: second derivatives were asked of implementation='pallas', which has "
        "gradients only. implementation='xla' has derivatives of any order: use it here."
    )


forward_once, backward_once = once(forward), once(backward)


def _forward_rule(config, q, k, v, q_scale, k_scale, cos, sin):
    out = forward_once(config, q, k, v, q_scale, k_scale, cos, sin)
    return out, (q, k, q_scale, k_scale, cos, sin)


def _backward_rule(config, residuals, cotangents):
    dq, dk, dv, dq_scale, dk_scale = backward_once(config, *residuals, *cotangents)
    # The angles come from integers, so nothing flows to them.
    return dq, dk, dv, dq_scale, dk_scale, None, None


differentiable = jax.custom_vjp(forward, nondiff_argnums=(0,))
differentiable.defvjp(_forward_rule, _backward_rule)
