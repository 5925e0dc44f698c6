"""`pl.pallas_call`, compiled or interpreted, also under `shard_map` and with 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from smalti.varying import vary_over, varying_axes


def check_interpret(interpret: Any) -> None:
    """Raises ValueError for what is no way to run a kernel."""
    if not (interpret is None or isinstance(interpret, bool | pltpu.InterpretParams)):
        raise ValueError(
            f"interpret: got {interpret!r}; it must be True, False, None or a "
            "jax.experimental.pallas.tpu.InterpretParams. Leave it out to compile."
        )


def launch(
    kernel: Callable[..., None],
    *arrays: jax.Array,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    interpret: Any,
    **options: Any,
) -> Sequence[jax.Array]:
    """``pl.pallas_call(kernel, …)(*arrays)``; the results vary over the axes of the arrays, which
    `shard_map` wants to be told.

    Args:
      arrays: each varies over the same axes of a mesh, or over none.
      out_shape: shapes and dtypes, without axes.
      interpret: False, True or a ``pltpu.InterpretParams``.
      options: of `pl.pallas_call`.
    """
    axes = varying_axes(arrays)
    if axes and not interpret:
        widest = max(arrays, key=lambda x: len(varying_axes(x)))
        varying = jax.typeof(widest).manual_axis_type
        out_shape = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in out_shape
        ]
    call = pl.pallas_call(kernel, out_shape=out_shape, interpret=interpret, **options)
    # With 64 bits Python's numbers are int64 in kernels and index maps, which Mosaic refuses.
    with jax.enable_x64(False):
        return _without_types(call, axes, *arrays) if axes and interpret else call(*arrays)


def _without_types(function, axes: frozenset, *arrays):
    """``function(*arrays)``, typed as outside of any `shard_map`; the results vary over ``axes``.

    JAX's Pallas interpreter needs it: it does not see that a kernel's constants meet what varies,
    and fails the checks that are `shard_map`'s default. A nested one that maps no axis of its own
    turns them off, for what is in it alone.
    """

    def untyped(*arrays):
        # What comes in still has its axes; what is computed here, where checks are off, has none.
        return function(*jax.tree.map(lambda x: lax.squeeze(x[None], (0,)), arrays))

    nested = jax.shard_map(untyped, in_specs=P(), out_specs=P(), check_vma=False)
    return vary_over(jax.jit(nested)(*arrays), axes)
