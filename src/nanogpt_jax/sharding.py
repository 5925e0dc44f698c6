"""Data parallelism over all devices: parameters everywhere, rows of the batch divided."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nanogpt_jax.config import Config, UserError

AXIS = "data"


def make_mesh() -> Mesh:
    """All devices of all processes in one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def check_batch(config: Config) -> None:
    """Raises UserError unless every device gets the same number of rows."""
    training, devices = config.training, jax.device_count()
    rows = training.batch_size // training.grad_accumulation
    if rows % devices:
        raise UserError(
            f"training.batch_size: got {training.batch_size} in {training.grad_accumulation} "
            f"part(s) of {rows} rows for {devices} devices; the rows of a part must be a multiple "
            "of the devices"
        )


def replicate(tree, mesh: Mesh):
    return jax.device_put(tree, NamedSharding(mesh, P()))


def shard_rows(rows: np.ndarray, mesh: Mesh, axis: int = 0) -> jax.Array:
    """A global array of this process's rows and those of the others, divided along `axis`."""
    spec = P(*[None] * axis, AXIS)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), rows)


def over_devices(
    function: Callable, mesh: Mesh | None, in_specs, out_specs, check_vma: bool
) -> Callable:
    """`function` on each device with its part: a Pallas kernel is not divided by the compiler.

    mesh: None for that of the context, of a TPU that is compiled for and not here.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
