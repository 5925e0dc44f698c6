"""`smalti.flex_pallas_attention`: the article's call, its causal flag, and what it refuses."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti import build_block_mask, flex_pallas_attention, masks
from tests.support.budgets import judge
from tests.support.inputs import Sizes, draw, normal

SIZES = Sizes(B=2, Sq=200, Sk=200, Hq=4, Hkv=2, D=16, Dv=8)
B, H, S = 2, 4, 200


def local_causal_mask(b, h, q, k, window=40):
    return (k <= q) & (k >= q - window + 1)


def run(block_mask, dtype="float32", **arguments):
    """Result and gradients, by name, and the inputs."""
    inputs = draw(SIZES, layout="BHSD", dtype=dtype)
    arrays = inputs.q, inputs.k, inputs.v
    out, pull = jax.vjp(
        lambda *arrays: flex_pallas_attention(*arrays, block_mask, **arguments),
        *map(jnp.asarray, arrays),
    )
    dq, dk, dv = pull(jnp.asarray(inputs.dout))
    return inputs, {"out": out, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_articles_call(dtype):
    block_mask = build_block_mask(local_causal_mask, B, H, S, 64, 32)
    inputs, got = run(block_mask, dtype, causal=True)
    arrays = inputs.q, inputs.k, inputs.v
    judged = judge(*arrays, dout=inputs.dout, layout="BHSD", mask=masks.sliding_window(40))
    judged.check({name: np.asarray(x) for name, x in got.items()})


@pytest.mark.parametrize("causal", [True, False])
def test_causal_is_anded_with_the_mask(causal):
    block_mask = build_block_mask(masks.local(30, 9), B, H, S, 200, 200)
    with warnings.catch_warnings():  # one tile, which stays alive: no warning
        warnings.simplefilter("error")
        inputs, got = run(block_mask, causal=causal)
    mask = masks.local(30, 0) if causal else masks.local(30, 9)
    arrays = inputs.q, inputs.k, inputs.v
    judged = judge(*arrays, dout=inputs.dout, layout="BHSD", mask=mask)
    judged.check({name: np.asarray(x) for name, x in got.items()})


def test_a_warning_where_causal_empties_tiles():
    q = k = v = jnp.zeros((B, H, S, 8))
    block_mask = build_block_mask(masks.prefix_lm(130), B, H, S, 64, 32)
    with pytest.warns(UserWarning, match=r"causal=True empties 4 of the \d+ tiles .* causal=False"):
        flex_pallas_attention(q, k, v, block_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_pallas_attention(q, k, v, block_mask, causal=False)
        flex_pallas_attention(q, k, v, build_block_mask(local_causal_mask, B, H, S, 64, 32))


def test_score_mod_and_what_it_captures():
    slopes = jnp.asarray(normal(H, seed="slopes"))
    block_mask = build_block_mask(local_causal_mask, B, H, S, 64, 64)
    inputs = draw(SIZES, layout="BHSD")
    arrays = [jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v)]

    def alibi(slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score - slopes[h] * (q_idx - kv_idx)

        return score_mod

    def loss(slopes):
        return (flex_pallas_attention(*arrays, block_mask, True, alibi(slopes)) ** 2).sum()

    def expected(slopes):
        distance = jnp.arange(S)[:, None] - jnp.arange(S)
        bias = -slopes[:, None, None] * distance
        mask = masks.sliding_window(40)
        options = {"layout": "BHSD", "implementation": "reference"}
        return (smalti.attention(*arrays, bias=bias, mask=mask, **options) ** 2).sum()

    got, want = jax.grad(loss)(slopes), jax.grad(expected)(slopes)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_masks_of_traced_arrays_need_no_other_program():
    traces = []

    @jax.jit
    def attend(q, ids):
        traces.append(1)
        block_mask = build_block_mask(masks.document(ids), B, H, S, 64, 64)
        return flex_pallas_attention(q, q, q, block_mask)

    q = jnp.asarray(normal(B, H, S, 8, seed="q"))
    for seed in (0, 1):
        ids = np.sort(np.random.default_rng(seed).integers(0, 3, (B, S)), 1).astype(np.int32)
        want = smalti.attention(
            q, q, q, mask=masks.document(ids) & masks.causal(), layout="BHSD"
        )  # fmt: skip
        np.testing.assert_allclose(attend(q, ids), want, atol=1e-6)
    assert len(traces) == 1


def test_on_a_tpu_the_kernels_run():
    shape = jax.ShapeDtypeStruct((B, H, S, 8), jnp.bfloat16)
    block_mask = build_block_mask(local_causal_mask, B, H, S, 128, 128)
    device = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(flex_pallas_attention, static_argnums=3)(
            shape, shape, shape, block_mask
        )
    assert "smalti_attention_forward" in str(jaxpr)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"block_mask": masks.causal()}, r"block_mask: got Causal; .*build_block_mask"),
        ({"block_mask": local_causal_mask}, r"block_mask: got function; .*build_block_mask"),
        ({"causal": 1}, r"causal: got 1; it must be True or False"),
        (
            {"block_mask": build_block_mask(masks.causal(), B, H, 100, 64, 64)},
            r"built for \[B, Hq, Sq, Sk\] = \[2, 4, 100, 100\] and is used at",
        ),
    ],
)
def test_what_is_refused(arguments, text):
    q = k = v = jnp.zeros((B, H, S, 8))
    given = {"block_mask": build_block_mask(masks.causal(), B, H, S, 64, 64)} | arguments
    with pytest.raises(ValueError, match=text):
        flex_pallas_attention(q, k, v, **given)


def test_heads_and_tokens_swapped():
    """The article's layout is [B, H, S, D], that of `smalti.attention` [B, S, H, D]."""
    block_mask = smalti.build_block_mask(smalti.masks.causal(), 1, 2, 16, 8, 8)
    q = jnp.zeros((1, 16, 2, 8))
    with pytest.raises(ValueError, match=r"heads and tokens look swapped: .* layout='BHSD'"):
        smalti.flex_pallas_attention(q, q, q, block_mask)
    with pytest.raises(ValueError, match=r"heads and tokens look swapped: .* layout='BHSD'"):
        smalti.attention(q.swapaxes(1, 2), q.swapaxes(1, 2), q.swapaxes(1, 2), mask=block_mask)
