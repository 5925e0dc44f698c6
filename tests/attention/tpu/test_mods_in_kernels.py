"""Masks and score functions in kernels: cases in which a plain reading of a program goes wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti import BlockSizes, masks
from smalti.attention.tpu import block_sizes
from smalti.attention.tpu.grid import Grid
from tests.support.calls import check
from tests.support.inputs import Sizes, draw, normal

SIZES = Sizes(B=1, Sq=16, Sk=16, Hq=1, Hkv=1, D=8, Dv=8)
INTERPRETED = {"implementation": "pallas", "interpret": True}


def gradients(implementation: str, inputs, block_sizes=None, *arrays, **make):
    """Result, dq, dk and dv; ``make``: functions of ``arrays``, which are traced."""
    how = {} if implementation == "reference" else {"interpret": True, "block_sizes": block_sizes}

    @jax.jit
    def both(q, k, v, dout, *arrays):
        arguments = {name: function(*arrays) for name, function in make.items()}
        out, pull = jax.vjp(
            lambda *qkv: smalti.attention(*qkv, implementation=implementation, **how, **arguments),
            *(q, k, v),
        )
        return out, *pull(dout)

    return both(inputs.q, inputs.k, inputs.v, inputs.dout, *arrays)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_jvp
def tripled(x):
    return jnp.tanh(x)


tripled.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 3.0 * tangents[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [straight_through, tripled, jax.checkpoint(jnp.tanh)], ids=["vjp", "jvp", "remat"]
)
def test_functions_with_derivatives_of_their_own(function):
    inputs = draw(SIZES)
    make = {"score_mod": lambda: lambda s, b, h, i, j: s + function(s)}
    want, got = (gradients(name, inputs, **make) for name in ("reference", "pallas"))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("score_mod", "primitive"),
    [
        (lambda s, b, h, i, j: jax.lax.fori_loop(0, 3, lambda n, x: x * 1.5, s), "scan"),
        (lambda s, b, h, i, j: jax.lax.cond(i >= j, lambda x: x, lambda x: -x, s), "cond"),
        (lambda s, b, h, i, j: jnp.dot(s, s), "dot_general"),
        (lambda s, b, h, i, j: jnp.max(jnp.stack([s, s])), "reduce_max"),
    ],
)
def test_what_is_no_arithmetic_is_refused_by_name(score_mod, primitive):
    q = jnp.zeros((1, 16, 1, 8))
    with pytest.raises(NotImplementedError, match=f"score_mod: it uses '{primitive}' on what"):
        smalti.attention(q, q, q, score_mod=score_mod, **INTERPRETED)


def test_an_array_read_by_the_score_is_refused():
    q = jnp.zeros((1, 16, 1, 8))
    seen = jnp.asarray(np.random.default_rng(0).random((16, 16)) < 0.5)

    def score_mod(score, b, h, i, j):
        return jnp.where(seen[i, jnp.where(score > 0, j, 0)], score, 0.0)

    with pytest.raises(NotImplementedError, match="an index that depends on the score"):
        smalti.attention(q, q, q, score_mod=score_mod, **INTERPRETED)


ARRAYS_MADE_INSIDE = {
    "zeros": lambda s, b, h, i, j: s + jnp.zeros((16, 16))[i, j],
    "full": lambda s, b, h, i, j: s + jnp.full(16, 2.0)[i * j % 16],
    "eye": lambda s, b, h, i, j: s + jnp.eye(16)[i, j],
    "by score": lambda s, b, h, i, j: s + jnp.zeros(8)[jnp.clip(s, 0, 7).astype(int)],
}


@pytest.mark.parametrize("name", ARRAYS_MADE_INSIDE)
def test_an_array_that_the_function_makes_and_reads_at_both_indices_is_refused(name):
    q = jnp.zeros((1, 16, 1, 8))
    with pytest.raises(NotImplementedError, match=r"it reads an array at an index .* as bias="):
        smalti.attention(q, q, q, score_mod=ARRAYS_MADE_INSIDE[name], **INTERPRETED)


def test_random_numbers_by_query_and_key_are_no_array_that_is_read():
    key = jax.random.key(0)

    def dropout(score, b, h, i, j):
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, i), j), 0.9)
        return jnp.where(kept, score, -jnp.inf)

    q = jnp.zeros((1, 16, 1, 8))
    with pytest.raises(NotImplementedError, match=r"it uses '\w+' on what differs"):
        smalti.attention(q, q, q, score_mod=dropout, **INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, i, j: j <= i + 0 * i,
        lambda b, h, i, j: (j <= i) & (i - i == 0),
        lambda b, h, i, j: i.astype("uint32") >= j.astype("uint32"),
    ],
    ids=["0 · i", "i − i", "unsigned"],
)
def test_masks_that_only_look_different(mask):
    inputs = draw(SIZES)
    got, want = (check("pallas", inputs, mask=x)["out"] for x in (mask, masks.causal()))
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_half_precision_arrays_become_float32_before_the_kernel():
    table = normal(16, seed="table").astype(np.float16)

    def score_mod(score, b, h, i, j, table):
        return score + table[j]

    check("pallas", draw(SIZES), score_mod=score_mod, captured=(table,))


@pytest.mark.slow
def test_queries_that_a_traced_length_leaves_nothing_in_a_whole_tile():
    """They are outside the window in a tile of which the length hides nothing."""
    inputs = draw(Sizes(B=1, Sq=256, Sk=256, Hq=1, Hkv=1, D=8, Dv=8))
    inputs.q[:, 200:] = inputs.dout[:, 200:] = np.nan
    make = {"mask": lambda n: masks.sliding_window(64) & masks.lengths(kv=n)}
    tiles, length = BlockSizes(128, 128), jnp.int32(128)
    want, got = (gradients(name, inputs, tiles, length, **make) for name in ("reference", "pallas"))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_keys_that_only_the_traced_part_of_a_mask_hides():
    """The known part shows them to queries that the traced one hides."""
    inputs = draw(Sizes(B=1, Sq=256, Sk=128, Hq=1, Hkv=1, D=8, Dv=8))
    inputs.k[:, 10:90] = inputs.v[:, 10:90] = np.nan
    ids = jnp.where(jnp.arange(256) < 128, -1, 0)[None]

    def mask(ids):
        known = masks.local(31, 1000) | masks.lengths(kv=4)
        return known & masks.document((ids, jnp.zeros((1, 128), jnp.int32)))

    want, got = (
        gradients(name, inputs, BlockSizes(128, 128), ids, mask=mask)
        for name in ("reference", "pallas")
    )
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "score_mod", "queries"),
    [
        (1, lambda x, score, h, i, j: score + x[h] * (j - i), "arbitrary"),
        (2047, lambda x, score, h, i, j: score + x[i - j + 1023], "arbitrary"),
        (1024, lambda x, score, h, i, j: score + x[i], "parallel"),
    ],
    ids=["number", "relative", "by query"],
)
def test_steps_that_add_to_one_gradient_are_of_one_core(length, score_mod, queries, monkeypatch):
    """On chips with two cores, steps along a parallel axis are divided among them."""
    monkeypatch.setattr(block_sizes, "MOST_MAJOR", 128)
    semantics, call = {}, Grid.call

    def recorded(grid, *args, name, **options):
        semantics[name] = dict(zip(grid.order, grid.semantics, strict=True))
        return call(grid, *args, name=name, **options)

    monkeypatch.setattr(Grid, "call", recorded)
    q = jnp.zeros((1, 1024, 1, 8))

    def loss(x):
        def with_array(score, b, h, i, j):
            return score_mod(x, score, h, i, j)

        return smalti.attention(q, q, q, score_mod=with_array, **INTERPRETED).sum()

    jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((length,), jnp.float32))
    found = semantics["smalti_attention_backward_dq"]
    assert found["i"] == queries
    assert found["g"] == "parallel"
    assert found["j"] == "arbitrary"
