"""What the compiled program is: the precision of its products, and the memory it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import smalti
from smalti import masks
from tests.support.calls import IMPLEMENTATIONS, call
from tests.support.cases import relative

TILED = [name for name in IMPLEMENTATIONS if name != "reference"]


def gradients(implementation, **arguments):
    def loss(q, k, v):
        out, lse = call(q, k, v, implementation=implementation, return_lse=True, **arguments)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def products(implementation, dtype, platform="tpu") -> list[str]:
    """Every matrix product of forward and backward as lowered, one line of text each."""
    x = jax.ShapeDtypeStruct((1, 300, 2, 16), dtype)
    traced = jax.jit(gradients(implementation, mask=masks.causal())).trace(x, x, x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = [line for line in text.splitlines() if "dot_general" in line]
    assert len(found) >= 5, text  # two of the forward, at least three of the backward
    return found


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_float32_products_run_at_highest_precision(implementation, platform):
    found = products(implementation, jnp.float32, platform)
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in found), "\n".join(found)


@pytest.mark.parametrize(
    ("chosen", "in_text"), [("bfloat16", "DEFAULT"), ("tensorfloat32", "HIGH")]
)
def test_the_user_may_choose_a_lower_precision(implementation, chosen, in_text):
    with jax.default_matmul_precision(chosen):
        found = products(implementation, jnp.float32)
    if implementation == "pallas" and in_text == "HIGH":
        in_text = "HIGHEST"  # the next that the compiler of kernels knows
    else:
        assert not any("HIGHEST" in line for line in found), "\n".join(found)
    if in_text != "DEFAULT":
        assert all(f"precision = [{in_text}, {in_text}]" in line for line in found)


def test_sums_of_low_precision_products_are_float32(implementation):
    for line in products(implementation, jnp.bfloat16):
        assert line.rsplit("->", 1)[1].count("xf32>") == 1, line


def largest_array(jaxpr) -> int:
    """Elements of the largest value that the program computes, nested programs included."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [int(np.prod(var.aval.shape)) for var in eqn.outvars if hasattr(var.aval, "shape")]
        sizes += [largest_array(inner) for inner in jaxprs_in_params(eqn.params)]
    return max(sizes)


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("kind", ["causal", "mask_mod", "segment_ids", "traced lengths"])
def test_no_array_is_as_large_as_the_scores(implementation, kind):
    """Forward and backward hold O(S · D), never S × S, under jit: in the program and compiled."""
    length, dim = 8192, 8
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    table = jnp.zeros(2 * length - 1)

    def program(q, k, v, ids):
        arguments = {
            "causal": lambda: {
                "mask": masks.causal(),
                "score_mod": relative,
                "captured": (table, jnp.ones(())),
            },
            "mask_mod": lambda: {"mask": lambda b, h, i, j: (i >= j) & (i - j < 700)},
            "segment_ids": lambda: {"mask": masks.causal(), "segment_ids": ids},
            "traced lengths": lambda: {"mask": masks.lengths(kv=ids[0, 0])},
        }[kind]()
        return gradients(implementation, **arguments)(q, k, v)

    traced = jax.jit(program).trace(x, x, x, ids)
    assert largest_array(traced.jaxpr.jaxpr) < length * length / 8
    compiled = traced.lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length


@pytest.mark.parametrize("implementation", TILED)
def test_keys_and_values_are_not_repeated(implementation):
    """32 query heads on one key head, and no array as large as 32 key arrays."""
    q = jax.ShapeDtypeStruct((1, 64, 32, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 8192, 1, 16), jnp.float32)
    function = gradients(implementation, block_sizes=smalti.BlockSizes(128, 128))
    traced = jax.jit(function).trace(q, k, k)
    assert largest_array(traced.jaxpr.jaxpr) < 32 * 8192 * 16
    assert traced.lower().compile().memory_analysis().temp_size_in_bytes < 32 * 8192 * 16 * 4


def test_the_reference_is_what_the_test_of_memory_can_catch():
    """The check itself: the reference does hold the scores."""
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    traced = jax.jit(gradients("reference", mask=masks.causal())).trace(x, x, x)
    assert largest_array(traced.jaxpr.jaxpr) >= 1024 * 1024
