"""What jax's transformations make of the kernels."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def transformable(function: Callable) -> Callable:
    """``function(*arrays)``, of arrays and results whose first axis is the batch: under `jax.vmap`
    the new axis joins the batch, where JAX would launch a kernel for each of its entries, one after
    the other; and derivatives, of which there are none, are refused."""
    batched = custom_vmap(function)

    @batched.def_vmap
    def fold(size, is_mapped, *arrays):
        def join(x, mapped):
            x = x if mapped else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = batched(*jax.tree.map(join, arrays, tuple(is_mapped)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    guarded = jax.custom_jvp(batched)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            "smalti.decode.attend: implementation 'pallas' has no derivatives; use "
            "implementation='reference'."
        )

    return guarded
