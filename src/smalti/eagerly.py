"""Values that are needed while a program is being traced, maybe for a machine that is not here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

Result = TypeVar("Result")
REMEMBERED = 64  # results of a function: more than a model has kinds of attention
LARGEST_KEY = 2**20  # bytes of arrays


def eagerly(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, computed now, with NumPy arrays as results.

    No argument may be traced. JAX keeps what is being traced, and the mesh for which, by thread: in
    one of its own `function` runs here and now. (`jax.ensure_compile_time_eval` runs it on the mesh
    in context, which a program that is compiled for a TPU from elsewhere does not have.)
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: jax.tree.map(np.asarray, function(*arguments))).result()


def remembered(function: Callable[[Any, Any], Result]) -> Callable[[Any, Any], Result]:
    """``function(tree, sizes)``, computed once for equal trees: the layers of a model all have the
    same mask, each its own object. Of what is traced or on other hosts, and of large arrays,
    nothing is kept."""
    found = functools.lru_cache(REMEMBERED)(lambda key, sizes: function(key.tree, sizes))

    @functools.wraps(function)
    def look_up(tree: Any, sizes: Any) -> Result:
        content = _content(tree)
        return function(tree, sizes) if content is None else found(_Key(content, tree), sizes)

    return look_up


class _Key:
    """A tree, equal to those of the same content."""

    def __init__(self, content: Hashable, tree: Any):
        self.content, self.tree = content, tree

    def __hash__(self):
        return hash(self.content)

    def __eq__(self, other):
        return isinstance(other, _Key) and self.content == other.content


def _content(tree: Any) -> Hashable | None:
    leaves, structure = jax.tree.flatten(tree)
    found = []
    for leaf in leaves:
        if isinstance(leaf, (int, float)):
            found.append(leaf)
        elif _is_here(leaf) and leaf.nbytes <= LARGEST_KEY:
            array = np.asarray(leaf)
            found.append((array.shape, str(array.dtype), array.tobytes()))
        else:
            return None
    return structure, tuple(found)


def _is_here(leaf: Any) -> bool:
    """Whether it is an array whose values this process has. A JAX array may be in pieces on other
    hosts; that of random keys has no NumPy array."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, np.ndarray)
    return (
        not isinstance(leaf, core.Tracer)
        and leaf.is_fully_addressable
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )
