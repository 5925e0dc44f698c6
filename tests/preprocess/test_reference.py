"""What only the plain formula can do."""

import jax
import jax.numpy as jnp
import numpy as np

from smalti.preprocess import qk_norm_rope

from . import oracle


def test_float16_is_computed_in_float32():
    case = oracle.draw(S=5, dtype="float16")
    outputs = qk_norm_rope(
        case.q, case.k, case.v, q_scale=case.q_scale, k_scale=case.k_scale, implementation="xla"
    )
    assert max(oracle.excesses(case, outputs).values()) <= 1


def test_second_derivatives_by_either_mode_agree():
    case = oracle.draw(B=1, S=2, Hq=1, Hkv=1, D=4)
    direction = case.cotangents[0].transpose(0, 2, 1, 3)

    def loss(q):
        return jnp.sum(jnp.sin(qk_norm_rope(q, case.k, case.v, implementation="xla")[0]))

    @jax.jit
    def curvatures(q):
        _, forward = jax.jvp(jax.grad(loss), (q,), (direction,))
        return forward, jax.grad(lambda q: jnp.vdot(jax.grad(loss)(q), direction))(q)

    forward, reverse = curvatures(case.q)
    assert np.abs(forward).max() > 0.1
    np.testing.assert_allclose(forward, reverse, rtol=1e-5, atol=1e-6)
