"""The ways the tests call the step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from smalti.preprocess import qk_norm_rope, vjp
from smalti.preprocess.tpu.tiles import Config

from .oracle import NAMES, Case

IMPLEMENTATIONS = {
    "xla": functools.partial(qk_norm_rope, implementation="xla"),
    "pallas": functools.partial(qk_norm_rope, implementation="pallas", interpret=True),
}


def arrays(case: Case):
    return tuple(getattr(case, name) for name in NAMES)


@functools.cache
def public(implementation: str, **options):
    """The public function with its arrays in order, ``(q, k, v, q_scale, k_scale, positions)``."""
    step = functools.partial(IMPLEMENTATIONS[implementation], **options)
    return lambda q, k, v, q_scale, k_scale, positions: step(
        q, k, v, q_scale=q_scale, k_scale=k_scale, positions=positions
    )


@functools.cache
def kernels(*, block_s: int | None = None, interpret=True):
    """The kernels with a tile size of the test's choosing, called as `public`."""
    config = Config(norm_eps=1e-6, interpret=interpret, block_s=block_s)

    def call(*xs):
        *xs, positions = xs
        if positions is None:
            positions = jnp.arange(xs[0].shape[1])
        return vjp.qk_norm_rope(*xs, positions, rope_theta=10_000.0, config=config)

    return call


def with_gradients(call, case: Case):
    """Outputs and gradients, as NumPy arrays that may be written to."""
    results = differentiated(call)(arrays(case), case.positions, case.cotangents)
    return jax.tree.map(np.array, results)


@functools.cache  # one compilation for a function and shapes, however often a test calls it
def differentiated(call):
    def run(primals, positions, cotangents):
        outputs, vjp = jax.vjp(lambda *xs: call(*xs, positions), *primals)
        return outputs, vjp(cotangents)

    return jax.jit(run)
