"""A function, lowered for a TPU in a process that has none and does not load its compiler."""

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from smalti.estimate.compile.target import Target


@dataclass(frozen=True)
class Lowered:
    name: str  # of the function
    module: bytes  # StableHLO as MLIR bytecode, source locations kept


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    target: Target,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: Sequence[int] = (),
) -> Lowered:
    """What jit makes of `fn`, as it would on the target itself.

    Not by jax.export: that writes kernels for older compilers, renames what has no name and needs
    flatbuffers. What `fn` raises while it is traced is the caller's own and passes through.
    """
    mesh = target.mesh()
    with jax.sharding.use_abstract_mesh(mesh), _own_locations():
        jitted = jax.jit(
            fn,
            in_shardings=_shardings(mesh, in_shardings, NamedSharding(mesh, PartitionSpec())),
            out_shardings=_shardings(mesh, out_shardings, None),
            donate_argnums=tuple(donate),
        )
        traced = jitted.trace(*(_shapes(index, arg) for index, arg in enumerate(args)))
        module: Any = traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    return Lowered(traced.fun_name, bytecode.getvalue())


_one_at_a_time = threading.Lock()


@contextmanager
def _own_locations() -> Iterator[None]:
    """Each operation has the place of its own line in the source, and nothing else.

    jax has no public names for either of these.
    """
    from jax._src.config import traceback_in_locations_limit
    from jax._src.pallas.mosaic import lowering

    # Pallas lowers like operations once, and gives all of them the place of the first: in a kernel
    # that reads k_ref and v_ref alike, v's cycles would be charged to the line of k.
    kept = lowering._uncacheable_primitives
    with _one_at_a_time:
        added = {p for rules in lowering.lowering_rules.values() for p in rules} - kept
        kept |= added
        try:
            # The frames around the innermost one are in no dump, and would change the program, so
            # its key in the cache, with every place that compile_for is called from.
            with traceback_in_locations_limit(1):
                yield
        finally:
            kept -= added


def _shapes(index: int, arg: Any) -> Any:
    def shape(path, leaf) -> jax.ShapeDtypeStruct:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"argument {index}{jax.tree_util.keystr(path)} is {leaf!r}, which has no shape and "
                "dtype: give a jax.ShapeDtypeStruct or an array, or bind a Python value with "
                "functools.partial"
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(shape, arg)


def _shardings(mesh: AbstractMesh, specs: Any, unstated: NamedSharding | None) -> Any:
    def sharding(spec: Any) -> NamedSharding | None:
        if spec is None:
            return unstated
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f"in_shardings and out_shardings hold {spec!r}; they are pytrees of "
                "jax.sharding.PartitionSpec over the axes of mesh_axes"
            )
        return NamedSharding(mesh, spec)

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    return jax.tree.map(sharding, specs, is_leaf=is_spec)
