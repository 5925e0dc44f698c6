"""Lower and compile over the topology's devices, as jax does it, in one process: what compile_for
must equal. A program, run by `test_equal`.

    LIBTPU_INIT_ARGS=… python -m tests.estimate.compile.compile_directly CASE

prints the HLO.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .kernels import X, double, scale_by_table

_QKV = (jax.ShapeDtypeStruct((1, 2, 512, 128), jnp.bfloat16),) * 3
CASES = {
    "double": (double, (X,)),
    "table": (lambda x: scale_by_table(jnp.array([3, 1, 4, 1]), double(x)), (X,)),
    "flash": (flash_attention, _QKV),
    "flash-backward": (jax.grad(lambda q, k, v: flash_attention(q, k, v).sum()), _QKV),
}


def main(case: str) -> None:
    fn, args = CASES[case]
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
    mesh = Mesh(np.array(topology.devices[:1]), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P())
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in args]
    with jax.set_mesh(mesh):
        print(jax.jit(fn).lower(*structs).compile().as_text())


if __name__ == "__main__":
    main(sys.argv[1])
