"""The ways the tests call the step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from smalti.preprocess import qk_norm_rope, vjp
from smalti.preprocess.rope import Rope
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
    """The public function, its arrays in order: q, k, v, q_scale, k_scale, positions, offset."""
    step = functools.partial(IMPLEMENTATIONS[implementation], **options)
    return lambda q, k, v, q_scale, k_scale, positions, offset=0: step(
        *(q, k, v),
        q_scale=q_scale,
        k_scale=k_scale,
        positions=positions,
        position_offset=offset,
    )


@functools.cache
def kernels(
    *,
    block_s: int | None = None,
    interpret=True,
    norm_eps: float | None = 1e-6,
    rope_interleaved: bool = False,
    rotary_dim: int | None = None,
):
    """The kernels with a tile size of the test's choosing, called as `public`."""

    def call(q, k, v, q_scale, k_scale, positions, offset=0):
        _, S, _, D = q.shape
        positions = offset + (jnp.arange(S) if positions is None else positions)
        rope = Rope(
            head_dim=D,
            rotary_dim=D if rotary_dim is None else rotary_dim,
            theta=10_000.0,
            interleaved=rope_interleaved,
        )
        config = Config(norm_eps=norm_eps, rope=rope, interpret=interpret, block_s=block_s)
        return vjp.qk_norm_rope(q, k, v, q_scale, k_scale, positions, config=config)

    return call


def with_gradients(call, case: Case):
    """Outputs and gradients, as NumPy arrays that may be written to."""
    where = case.positions, case.position_offset
    results = differentiated(call)(arrays(case), where, case.cotangents)
    return jax.tree.map(np.array, results)


@functools.cache  # one compilation for a function and shapes, however often a test calls it
def differentiated(call):
    def run(primals, where, cotangents):
        outputs, vjp = jax.vjp(lambda *xs: call(*xs, *where), *primals)
        return outputs, vjp(cotangents)

    return jax.jit(run)
