"""Functions that have derivatives of the first order only, and say so."""

from __future__ import annotations

from collections.abc import Callable

import jax


def first_order(function: Callable, name: str, *, instead: str) -> Callable:
    """``function``, a part of a rule of differentiation, refusing to be differentiated itself: JAX
    would try what is inside, and fail obscurely. ``instead``: the implementation that has more."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f"{name} has first derivatives only; for second derivatives use "
            f"implementation={instead!r}."
        )

    return guarded
