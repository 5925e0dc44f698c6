"""What `reference` alone promises; that it is right, tests/contract shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from smalti import masks
from smalti.attention.reference import reference
from tests.support.inputs import Sizes, draw

SIZES = Sizes(B=2, Sq=5, Sk=9, Hq=4, Hkv=2, D=3, Dv=2)


def call(q, k, v, mask, **arguments):
    options = dict.fromkeys(("score_mod", "bias", "sinks", "softcap"), None) | {"scale": 0.7}
    return reference(q, k, v, mask=mask.bind(2, 4, 5, 9), **{**options, **arguments})


def test_shapes_and_dtypes():
    for dtype in ("float32", "bfloat16", "float16"):
        inputs = draw(SIZES, layout="BHSD", dtype=dtype)
        out, lse = call(inputs.q, inputs.k, inputs.v, masks.causal())
        assert (out.shape, out.dtype) == ((2, 4, 5, 2), dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 5), jnp.float32)


def test_against_jax_nn():
    inputs = draw(SIZES, layout="BHSD")
    out, _ = call(inputs.q, inputs.k, inputs.v, masks.causal(offset=0))
    q, k = (jnp.swapaxes(x, 1, 2) for x in (inputs.q, inputs.k))
    v = jnp.pad(jnp.swapaxes(inputs.v, 1, 2), ((0, 0),) * 3 + ((0, 1),))  # Dv = D there
    theirs = jax.nn.dot_product_attention(q, k, v, scale=0.7, is_causal=True)[..., :2]
    np.testing.assert_allclose(jnp.swapaxes(out, 1, 2), theirs, atol=1e-6)


@pytest.mark.slow
def test_all_orders_and_modes_of_differentiation_where_rows_are_empty():
    inputs = draw(SIZES, layout="BHSD")
    q, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))

    def loss(q, k, v):
        out, lse = call(q, k, v, masks.causal(offset=-2), softcap=2.0)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2)

    check_grads(jax.jit(loss), (q, k, v), order=2, rtol=5e-2, atol=5e-2)


def test_keys_and_values_are_not_repeated():
    q, k = jnp.zeros((2, 4, 5, 3)), jnp.zeros((2, 1, 9, 3))
    jaxpr = jax.make_jaxpr(lambda q, k, v: call(q, k, v, masks.full()))(q, k, k)
    assert not any(
        var.aval.shape == (2, 4, 9, 3) for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars
    )
