"""The ways the tests call the step."""

import functools

import jax
import jax.numpy as jnp

from smalti.preprocess import qk_norm_rope, vjp
from smalti.preprocess.tpu.tiles import Config

from .oracle import NAMES, Case

IMPLEMENTATIONS = {
    "xla": functools.partial(qk_norm_rope, implementation="xla"),
    "pallas": functools.partial(qk_norm_rope, implementation="pallas", interpret=True),
}


def arrays(case: Case):
    return tuple(getattr(case, name) for name in NAMES)


def with_gradients(call, case: Case):
    """``call(*arrays, positions)`` and its gradients, under jit: outputs, gradients."""

    def run(primals, positions, cotangents):
        outputs, vjp = jax.vjp(lambda *xs: call(*xs, positions), *primals)
        return outputs, vjp(cotangents)

    return jax.jit(run)(arrays(case), case.positions, case.cotangents)


def public(implementation: str, case: Case):
    """The public function in the form that `with_gradients` takes."""
    step = IMPLEMENTATIONS[implementation]

    def call(q, k, v, q_scale, k_scale, positions):
        scales = {"q_scale": q_scale, "k_scale": k_scale}
        return step(q, k, v, **scales, positions=positions, **case.options)

    return call


def kernels(case: Case, *, block_s: int | None = None, interpret=True):
    """The kernels with a tile size of the test's choosing, in the same form."""
    config = Config(norm_eps=case.norm_eps, interpret=interpret, block_s=block_s)

    def call(*xs):
        *xs, positions = xs
        if positions is None:
            positions = jnp.arange(case.q.shape[1])
        return vjp.qk_norm_rope(*xs, positions, rope_theta=case.rope_theta, config=config)

    return call
