"""`jax.vmap` and differentiation of the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.decode.tpu.transformations import transformable
from tests.decode.calls import Case, step
from tests.decode.oracle import Rules


def test_a_mapped_axis_joins_the_batch():
    shapes = []

    def summed(x, tree):
        shapes.append((x.shape, tree["y"].shape))
        return {"out": x + tree["y"].sum(-1)}

    x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones((2, 4))
    function = transformable(summed)
    out = jax.vmap(function, (0, None))(x, {"y": y})["out"]
    np.testing.assert_array_equal(out, x + 4)
    assert shapes[-1] == ((6,), (6, 4))
    twice = jax.vmap(jax.vmap(function, (0, None)), (None, 0))(x, {"y": y[None]})["out"]
    np.testing.assert_array_equal(twice, x[None] + 4)


def test_vmap_launches_no_kernel_more():
    case = Case(Rules(2, 5, "cache"), 2, np.full((2, 2), 2))
    mapped = jax.vmap(step(case, "pallas"), (None, 0))
    jaxpr = str(jax.make_jaxpr(mapped)(case.empty(), (*case.chunks, case.lengths)))
    assert jaxpr.count("pallas_call[") == 2
    assert "while" not in jaxpr


def test_derivatives_are_refused():
    case = Case(Rules(2, 5), 2, np.full((1, 1), 2))
    cache, (q, k, v) = case.empty(), (x[0] for x in case.chunks)
    attend_chunk = step(case, "pallas")

    def loss(x, forward: bool):
        cache_after, out = attend_chunk(cache, (x, k, v, case.lengths[0]))
        return out.sum() if forward else cache_after.k.sum()

    for transform in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="no derivatives; use implementation='ref"):
            transform(lambda x: loss(x, True))(q)
