"""Probes whose answer is known exactly; each names the fault that it betrays."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.attention.oracle import oracle
from tests.support.calls import call, run
from tests.support.cases import MASKS
from tests.support.inputs import Sizes, draw, normal

pytestmark = pytest.mark.slow

SIZES = Sizes(B=2, Sq=140, Sk=140, Hq=4, Hkv=2, D=8, Dv=8)


def forward(implementation, q, k, v, **arguments):
    return np.asarray(call(q, k, v, implementation=implementation, **arguments))


@functools.cache
def without_arguments(implementation):
    inputs = draw(SIZES)
    return forward(implementation, inputs.q, inputs.k, inputs.v)


def visible_pairs(arguments, sizes=SIZES) -> np.ndarray:
    zeros = np.zeros((sizes.B, 1, sizes.Hq, 1), np.float32)
    q = np.repeat(zeros, sizes.Sq, 1)
    k = np.repeat(zeros[:, :, : sizes.Hkv], sizes.Sk, 1)
    return oracle(q, k, k, **arguments).visible


@pytest.mark.parametrize("mask", ["sliding_window", "streaming", "local", "prefix_lm", "lengths"])
def test_one_hot_values_show_who_is_seen(implementation, mask):
    """A window off by one, a border tile dropped or added: with all scores equal, every weight is
    one over the number of visible keys, and column j of the result is the weight of key j."""
    sizes = Sizes(B=2, Sq=140, Sk=140, Hq=2, Hkv=1, D=4, Dv=140)
    arguments = MASKS[mask](sizes)
    inputs = draw(sizes)
    v = np.broadcast_to(np.eye(140, dtype=np.float32)[:, None], inputs.v.shape)
    weights = forward(implementation, inputs.q * 0, inputs.k, v, **arguments)
    seen = visible_pairs(arguments, sizes).swapaxes(1, 2)  # [B, Sq, Hq, Sk]
    np.testing.assert_array_equal(weights != 0, seen)
    np.testing.assert_allclose(
        weights, seen / np.maximum(seen.sum(-1, keepdims=True), 1), rtol=1e-6
    )


@pytest.mark.parametrize("mask", ["none", "streaming", "segment_ids, padded", "mask_mod"])
def test_constant_values_give_the_constant(implementation, mask):
    """Weights that do not add up to 1: a wrong normaliser, keys counted twice or lost."""
    arguments = MASKS[mask](SIZES)
    inputs = draw(SIZES, logits="sharp")
    out = forward(implementation, inputs.q, inputs.k, np.ones_like(inputs.v), **arguments)
    some = visible_pairs(arguments).any(-1).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(out, np.broadcast_to(some, out.shape).astype(np.float32), rtol=2e-6)


def test_each_query_head_reads_its_own_key_head(implementation):
    """Head h of q belongs to h // (Hq / Hkv): modulo instead of division, or neighbours mixed."""
    sizes = Sizes(B=1, Sq=5, Sk=9, Hq=6, Hkv=2, D=4, Dv=3)
    inputs = draw(sizes)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[:, None], inputs.v.shape)
    out = forward(implementation, inputs.q, inputs.k, v)
    expected = np.broadcast_to(np.repeat(np.arange(2.0), 3)[:, None], out.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_permuted_heads_and_batch_entries(implementation):
    """Results of one head or entry that depend on another."""
    inputs = draw(SIZES)
    arguments = {"mask": masks.causal(), "bias": normal(2, 4, 1, 140, seed="bias")}
    out = forward(implementation, inputs.q, inputs.k, inputs.v, **arguments)
    swapped = {name: getattr(inputs, name)[::-1] for name in "qkv"}
    swapped = {name: x[:, :, ::-1] for name, x in swapped.items()}
    arguments["bias"] = arguments["bias"][::-1, ::-1]
    np.testing.assert_array_equal(
        forward(implementation, **swapped, **arguments)[::-1, :, ::-1], out
    )


@pytest.mark.parametrize("mask", ["causal", "sliding_window", "streaming"])
def test_prefix_invariance(implementation, mask):
    """A result that depends on the future: the first 70 rows with other tokens after them."""
    arguments = MASKS[mask](SIZES)
    inputs, others = draw(SIZES), draw(SIZES, seed=1)
    results = []
    for rest in (inputs, others):
        q, k, v = (
            np.concatenate([getattr(inputs, x)[:, :70], getattr(rest, x)[:, 70:]], 1) for x in "qkv"
        )
        results.append(forward(implementation, q, k, v, **arguments)[:, :70])
    np.testing.assert_array_equal(*results)


def test_order_of_keys_within_a_document_does_not_matter(implementation):
    """Positions leaking into a mask that knows none."""
    ids = np.repeat(np.arange(4, dtype=np.int32), 35)[None].repeat(2, 0)
    order = np.concatenate([np.random.default_rng(i).permutation(35) + 35 * i for i in range(4)])
    inputs = draw(SIZES)
    out = forward(implementation, inputs.q, inputs.k, inputs.v, segment_ids=ids)
    again = forward(
        implementation, inputs.q, inputs.k[:, order], inputs.v[:, order], segment_ids=ids
    )
    np.testing.assert_allclose(again, out, atol=2e-6)


@pytest.mark.parametrize("mask", ["causal", "streaming", "mask_mod", "segment_ids, padded"])
def test_gradients_of_one_query_at_keys_it_does_not_see_are_0(implementation, mask):
    """One row's cotangents alone: what arrives at a key that it does not see took a wrong way."""
    arguments = MASKS[mask](SIZES)
    visible = visible_pairs(arguments)
    row = int(np.argmax(visible.any((0, 1, 3)) & ~visible.all((0, 1, 3)) & (np.arange(140) > 64)))
    inputs = draw(SIZES)
    inputs.dout[:, np.arange(140) != row] = 0
    inputs.dlse[:, :, np.arange(140) != row] = 0
    bias = normal(2, 4, 140, 140, seed="bias")
    got = run(inputs, implementation=implementation, bias=bias, **arguments)
    seen = visible[:, :, row].reshape(2, 2, 2, 140).any(2).swapaxes(1, 2)  # [B, Sk, Hkv]
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(got[name].any(-1), seen, err_msg=name)
    np.testing.assert_array_equal(got["dbias"][:, :, row] != 0, visible[:, :, row])
    others = np.arange(140) != row
    assert not got["dbias"][:, :, others].any()
    assert not got["dq"][:, others].any()


def test_scale_and_queries_are_exchangeable(implementation):
    """An argument ignored or used twice. Powers of two are exact."""
    inputs = draw(SIZES)
    out = forward(implementation, inputs.q, inputs.k, inputs.v, scale=0.5, mask=masks.causal())
    again = forward(
        implementation, inputs.q * 4, inputs.k, inputs.v, scale=0.125, mask=masks.causal()
    )
    np.testing.assert_array_equal(again, out)


def test_a_sink_is_a_key_without_a_value(implementation):
    inputs = draw(SIZES)
    sinks = normal(4, seed="sinks")
    out = forward(implementation, inputs.q, inputs.k, inputs.v, sinks=sinks)
    # One more key whose score is the sink's logit, by its bias, and whose value is 0.
    k, v = (np.concatenate([x, x[:, :1] * 0], 1) for x in (inputs.k, inputs.v))
    bias = np.zeros((1, 4, 1, 141), np.float32)
    bias[0, :, 0, 140] = sinks
    again = forward(implementation, inputs.q, k, v, bias=bias)
    np.testing.assert_allclose(out, again, atol=1e-6)


def test_lse_is_natural_and_halves_merge(implementation):
    inputs = draw(SIZES)
    q, k, v = inputs.q, inputs.k, inputs.v
    whole, lse = call(q, k, v, implementation=implementation, return_lse=True)
    parts = [
        call(q, k[:, s], v[:, s], implementation=implementation, return_lse=True)
        for s in (slice(0, 60), slice(60, 140))
    ]
    merged = jnp.logaddexp(parts[0][1], parts[1][1])
    np.testing.assert_allclose(merged, lse, atol=2e-6)
    weight = jnp.exp(jnp.stack([x[1] for x in parts]) - merged).swapaxes(2, 3)[..., None]
    out = weight[0] * parts[0][0] + weight[1] * parts[1][0]
    np.testing.assert_allclose(out, whole, atol=1e-6)
    one = call(q, k[:, :1], v[:, :1], implementation=implementation, return_lse=True)[1]
    score = np.einsum("bqhd,bhd->bhq", q, np.repeat(k[:, 0], 2, 1)) / np.sqrt(8)
    np.testing.assert_allclose(one, score, atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": masks.causal()},
        {"softcap": 1.0},
        {"scale": 0.1},
        {"bias": normal(140, 140)},
        {"sinks": np.zeros(4, np.float32)},
        {"segment_ids": np.repeat(np.arange(2, dtype=np.int32), 70)[None].repeat(2, 0)},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_argument_is_ignored(implementation, change):
    inputs = draw(SIZES)
    plain = without_arguments(implementation)
    changed = forward(implementation, inputs.q, inputs.k, inputs.v, **change)
    assert np.abs(plain - changed).max() > 1e-3
