"""`shard_map` types every value by the mesh axes over which it varies. A loop's carry needs one
type from the start, so constants that start a carry are cast to the type of the data."""

from __future__ import annotations

import jax
from jax import lax


def varying_axes(tree) -> frozenset:
    """The manual mesh axes over which any array of the tree varies."""
    return frozenset().union(*(_axes(x) for x in jax.tree.leaves(tree)))


def vary_over(tree, axes: frozenset):
    """The tree with every array varying over at least ``axes``. Its transpose sums over the axes
    that were added."""

    def cast(x):
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def vary_like(tree, like):
    """The tree with every array varying over the axes of ``like``."""
    return vary_over(tree, _axes(like))


def _axes(x) -> frozenset:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
