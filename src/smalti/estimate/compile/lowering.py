"""A function, lowered for a TPU in a process that has none and does not load its compiler."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

# Private, and no public name does it: `jax.config.update` is not of this thread alone.
from jax._src.config import traceback_in_locations_limit  # isort: skip

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
    # A location keeps the innermost frame, which is what the compiler writes into its dumps. The
    # frames around it would change the program with every place that compile_for is called from.
    with jax.sharding.use_abstract_mesh(mesh), traceback_in_locations_limit(1):
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
