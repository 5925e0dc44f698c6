"""A program that forbids implicit promotion of dtypes or ranks can still call smalti: none happens
inside."""

import jax
import jax.numpy as jnp
import pytest

from smalti import masks
from tests.support.calls import IMPLEMENTATIONS, Refused, call

B, S, HQ, HKV, D = 2, 40, 4, 2, 8


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def documents():
    return jnp.repeat(jnp.arange(2, dtype=jnp.int32), S // 2)[None].repeat(B, axis=0)


# Made inside the strict context: so are the arrays in them.
ARGUMENTS = {
    "nothing": dict,
    "causal": lambda: {"mask": masks.causal()},
    "window": lambda: {"mask": masks.sliding_window(9)},
    "local": lambda: {"mask": masks.local(3, 5)},
    "streaming": lambda: {"mask": masks.streaming(sinks=2, window=9)},
    "prefix": lambda: {"mask": masks.prefix_lm(jnp.array([3, 4]))},
    "documents": lambda: {"mask": masks.document(documents()) & masks.causal()},
    "lengths": lambda: {"mask": masks.lengths(q=jnp.array([9, 40]), kv=jnp.array([7, 8]))},
    "not": lambda: {"mask": ~masks.causal() | masks.sliding_window(2)},
    "mask_mod": lambda: {"mask": lambda b, h, q_idx, kv_idx: (q_idx + h) >= kv_idx},
    "segments": lambda: {"segment_ids": documents()},
    "bias": lambda: {"bias": jnp.ones((1, HQ, S, S))},
    "softcap": lambda: {"softcap": 3.0},
    "sinks": lambda: {"sinks": jnp.ones(HQ)},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_and_its_gradients(implementation, dtype):
    q = jax.random.normal(jax.random.key(0), (B, S, HQ, D)).astype(dtype)
    k, v = jax.random.normal(jax.random.key(1), (2, B, S, HKV, D)).astype(dtype)
    for name, arguments in ARGUMENTS.items():

        def loss(q, k, v, arguments=arguments):
            out, lse = call(q, k, v, implementation=implementation, return_lse=True, **arguments())
            return jnp.sum(out.astype("float32")) + jnp.sum(jnp.where(lse > -1e9, lse, 0.0))

        try:
            gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, k, v)
        except Refused:
            continue
        assert [x.dtype for x in gradients] == [dtype] * 3, name
