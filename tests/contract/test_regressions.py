"""Faults that were found by trying to break the contract, each as its right value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti import masks
from tests.support.calls import call
from tests.support.inputs import Sizes, draw

SIZES = Sizes(B=2, Sq=8, Sk=8, Hq=4, Hkv=2, D=4, Dv=3)


def inputs():
    drawn = draw(SIZES)
    return tuple(jnp.asarray(x) for x in (drawn.q, drawn.k, drawn.v))


def test_softcap_does_not_show_what_score_mod_hides(implementation):
    def causal(score, b, h, q_idx, kv_idx):
        return jnp.where(kv_idx <= q_idx, score, -jnp.inf)

    arguments = {"softcap": 2.0, "implementation": implementation, "return_lse": True}
    got = call(*inputs(), score_mod=causal, **arguments)
    expected = call(*inputs(), mask=masks.causal(), **arguments)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_keys_that_score_mod_hides_may_be_nan(implementation):
    q, k, v = inputs()
    table = jnp.where(jnp.arange(8) >= 6, -jnp.inf, 0.0)

    def loss(q, k, v):
        return call(
            q,
            k,
            v,
            score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
            implementation=implementation,
        ).sum()

    clean = jax.grad(loss, (0, 1, 2))(q, k, v)
    poisoned = jax.grad(loss, (0, 1, 2))(q, k.at[:, 6:].set(jnp.nan), v.at[:, 6:].set(jnp.inf))
    for a, b in zip(poisoned, clean, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_visible_key_that_is_not_finite_is_not_dropped(implementation):
    q, k, v = inputs()
    out = call(
        q,
        k.at[0, 3].set(jnp.inf),
        v,
        score_mod=lambda score, b, h, q_idx, kv_idx: 2 * score,
        implementation=implementation,
    )
    assert not np.isfinite(out[0]).all()


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 4), (4, 8)])
def test_a_block_mask_of_other_batch_and_heads(implementation, batch, heads):
    block_mask = masks.build_block_mask(masks.causal(), batch, heads, 8, 8, 4, 4)
    got = call(*inputs(), mask=block_mask, implementation=implementation)
    expected = call(*inputs(), mask=masks.causal(), implementation=implementation)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


LARGE = [
    (lambda: masks.local(0, 2**31 - 1), lambda: masks.local(0, 100)),
    (lambda: masks.streaming(sinks=2, window=10**10), masks.causal),
    (lambda: masks.causal(2**31 - 1), masks.full),
    (lambda: masks.causal(2**40), masks.full),
    (lambda: masks.sliding_window(2**40), masks.causal),
    (lambda: masks.sliding_window(2**31 - 1, offset=-6), lambda: masks.causal(offset=-6)),
    (lambda: masks.lengths(kv=np.array([2**32 + 3] * 2)), masks.full),
    (lambda: masks.prefix_lm(2**40), masks.full),
]


@pytest.mark.parametrize(
    ("implementation", "large", "same"),
    [
        *((name, *pair) for name in ("reference", "blockwise") for pair in LARGE),
        *(("pallas", *pair) for pair in LARGE[:2]),  # one for each way that it looks at masks
    ],
)
def test_sizes_beyond_int32_mean_everything(implementation, large, same):
    got, expected = (
        call(*inputs(), mask=mask(), implementation=implementation) for mask in (large, same)
    )
    np.testing.assert_array_equal(got, expected)


def test_ids_beyond_int32_are_refused():
    with pytest.raises(ValueError, match=r"ids run from 5 to 4294967301; they must fit int32"):
        masks.document(np.array([5, 2**32 + 5]))
    with pytest.raises(ValueError, match="must fit int32"):
        smalti.attention(*inputs(), segment_ids=np.full((2, 8), 2**31, np.uint32))


def test_nested_lists_are_ids_of_a_batch():
    assert masks.document([[1, 2], [1, 2]]).q_ids.shape == (2, 2)


def test_an_empty_row_passes_nothing_on_to_its_sink(implementation):
    q, k, v = inputs()

    def out(sinks):
        return call(q, k, v, mask=masks.lengths(q=5), sinks=sinks, implementation=implementation)

    dout = jnp.ones((2, 8, 4, 3)).at[:, 5:].set(jnp.nan)
    (dsinks,) = jax.vjp(out, jnp.arange(4.0))[1](dout)
    assert np.isfinite(dsinks).all()


def test_with_x64_enabled(implementation):
    q, k, v = inputs()
    table = jnp.linspace(0, 1, 8)

    def loss(q, k, v, table):
        out, lse = call(
            q,
            k,
            v,
            mask=masks.causal() | masks.prefix_lm(2),
            score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
            return_lse=True,
            implementation=implementation,
        )
        return out.sum() + lse.sum()

    expected = jax.grad(loss, (0, 1, 2, 3))(q, k, v, table)
    with jax.enable_x64(True):
        got = jax.grad(loss, (0, 1, 2, 3))(q, k, v, table)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_masks_and_block_masks_say_how_to_combine():
    block_mask = masks.build_block_mask(masks.full(), 1, 1, 8, 8, 4, 4)
    with pytest.raises(ValueError, match=r"Combine the masks with `&`, `\|` and `~` first"):
        masks.causal() & block_mask
    with pytest.raises(TypeError, match="a BlockMask has no truth value"):
        bool(block_mask)
    assert repr(np.ones((8, 8), bool) & masks.causal()) == "(array[1, 1, 8, 8] & causal())"


@pytest.mark.parametrize("block_sizes", [(3, 3), (8, 4), (4, 2)])
def test_block_sizes_other_than_those_of_a_block_mask(block_sizes):
    block_mask = smalti.build_block_mask(masks.full(), 1, 1, 8, 4, 4)
    with pytest.raises(
        ValueError,
        match=r"block_sizes: got BlockSizes\(.*\) with a BlockMask of block_q=4, block_kv=4; .* "
        r"Leave block_sizes out, or build",
    ):
        smalti.attention(
            *inputs(),
            mask=block_mask,
            block_sizes=smalti.BlockSizes(*block_sizes),
            segment_ids=np.zeros((len(inputs()[0]), 8), np.int32),
        )


@pytest.mark.parametrize(("tiles", "block_sizes"), [((4, 2), (4, 2)), ((4, 100), (4, 64))])
def test_block_sizes_that_repeat_those_of_a_block_mask(tiles, block_sizes):
    """Cut down to the lengths, as either is."""
    block_mask = smalti.build_block_mask(masks.causal(), 1, 1, 8, *tiles)
    got = smalti.attention(*inputs(), mask=block_mask, block_sizes=smalti.BlockSizes(*block_sizes))
    expected = smalti.attention(*inputs(), mask=masks.causal(), implementation="reference")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("captured", [np.arange(8) < 3, [True, False] * 4], ids=["array", "list"])
def test_a_mod_that_captures_numpy_gets_advice(captured):
    with pytest.raises(ValueError, match=r"mask_mod: it indexes .* Wrap what it captures in jnp"):
        smalti.attention(*inputs(), mask=lambda b, h, q_idx, kv_idx: captured[kv_idx])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"return_lse": 1}, ValueError, "return_lse: got 1; it must be True or False"),
        ({"scale": 1e39}, ValueError, "scale: got .* finite in float32"),
        ({"softcap": 10**400}, ValueError, "softcap: got .* finite in float32"),
        ({"scale": np.complex64(1)}, TypeError, "scale: got .* Python float"),
        ({"layout": "bshd"}, ValueError, "Did you mean 'BSHD'"),
    ],
)
def test_arguments_that_were_once_accepted(arguments, error, text):
    with pytest.raises(error, match=text):
        smalti.attention(*inputs(), **arguments)
