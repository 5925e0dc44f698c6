"""Every peer lowers for a TPU and computes what it should."""

import dataclasses
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from smalti.estimate.errors import EstimateError
from smalti.estimate.peers import (
    ATTENTION_PEERS,
    PASSES,
    AttentionCase,
    attention_variants,
    tokamax,
)
from tests.estimate.peers.support import arrays, interpret, lower, plain_attention
from tests.support.tokamax import NO_TOKAMAX, needs_tokamax

PEERS = [
    pytest.param(peer, marks=needs_tokamax if peer == "tokamax" else ()) for peer in ATTENTION_PEERS
]
KERNELS = [peer for peer in PEERS if peer.values != ("xla",)]

CASES = {
    "causal": AttentionCase.parse("B=1,Hq=2,Hkv=2,S=256,D=128"),
    "batch, groups, layout, padding": AttentionCase.parse(
        "B=2,Hq=4,Hkv=2,S=200,D=128", layout="BSHD"
    ),
    "full, padding": AttentionCase.parse("B=1,Hq=2,Hkv=1,Sq=256,Sk=200,D=128", mask="full"),
    "window, more keys": AttentionCase.parse(
        "B=1,Hq=2,Hkv=2,Sq=130,Sk=300,D=128", mask="sliding_window(70)"
    ),
    "half a lane": AttentionCase.parse("B=1,Hq=2,Hkv=2,S=256,D=64"),
}


# One of them has it all; the others take the rest of a minute.
ALL_CASES = [
    pytest.param(case, id=name, marks=() if "groups" in name else pytest.mark.slow)
    for name, case in CASES.items()
]
GRADS = ("dq", "dk", "dv")


def assert_close(got, expected, name):
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4, err_msg=name)


def usable(peer, case, which):
    return [v for v in attention_variants(peer, case, which) if v.refused is None]


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("peer", PEERS)
def test_every_variant_lowers_for_a_tpu(peer, case, which):
    for variant in usable(peer, case, which):
        lowered = lower(variant)
        q, k, v = case.inputs()
        grads = [(x.shape, x.dtype) for x in (q, k, v)]
        out = [(case.output().shape, case.output().dtype)]
        expected = {"forward": out, "backward": grads, "both": out + grads}[which]
        assert [(x.shape, x.dtype) for x in lowered.out_avals] == expected
        kernels = lowered.mlir_module().count("tpu_custom_call")
        assert (kernels > 0) == (peer != "xla")


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("peer", PEERS)
def test_the_forward_is_attention(peer, case, monkeypatch):
    case = dataclasses.replace(case, dtype="float32")
    interpret(monkeypatch)
    inputs = arrays(case.inputs())
    expected = plain_attention(case, *inputs)
    for variant in usable(peer, case, "forward")[:1]:
        assert_close(variant.fn(*inputs), expected, variant.name)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_every_choice_of_blocks_is_attention(peer, monkeypatch):
    case = dataclasses.replace(AttentionCase.parse("B=1,Hq=2,Hkv=1,S=600,D=128"), dtype="float32")
    interpret(monkeypatch)
    inputs = arrays(case.inputs())
    expected = plain_attention(case, *inputs)
    for variant in usable(peer, case, "forward"):
        assert_close(variant.fn(*inputs), expected, variant.name)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_both_passes_are_attention_and_its_gradients(peer, monkeypatch):
    case = dataclasses.replace(CASES["batch, groups, layout, padding"], dtype="float32")
    interpret(monkeypatch)
    inputs = arrays(case.inputs())
    (dout,) = arrays([case.output()], seed=1)
    out, vjp = jax.vjp(lambda *x: plain_attention(case, *x), *inputs)
    for variant in usable(peer, case, "both"):
        got = variant.fn(*inputs, dout)
        for name, mine, theirs in zip(("out", *GRADS), got, (out, *vjp(dout)), strict=True):
            assert_close(mine, theirs, f"{variant.name}: {name}")


@needs_tokamax
@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, None])
def test_tokamaxs_sums_of_dq_are_right(steps):
    """Both ways of adding up dq, over more key tiles than three.

    In TPU interpret mode: the plain one does not show an aliased operand what was written to it.
    """
    case = AttentionCase.parse("B=1,Hq=2,Hkv=2,S=512,D=128", dtype="float32")
    names = (*tokamax.FORWARD_NAMES, *tokamax.BACKWARD_NAMES)
    config = {**dict.fromkeys(names, 128), "dq_reduction_steps": steps}
    inputs = arrays(case.inputs())
    (dout,) = arrays([case.output()], seed=1)
    out, vjp = jax.vjp(lambda *x: plain_attention(case, *x), *inputs)
    with pltpu.force_tpu_interpret_mode():
        got = tokamax.variant(case, "both", config, "mha", "").fn(*inputs, dout)
    for name, mine, theirs in zip(("out", *GRADS), got, (out, *vjp(dout)), strict=True):
        assert_close(mine, theirs, name)


@pytest.mark.parametrize(("peer", "lse_unit"), [("splash", 1.0), ("tokamax", math.log(2.0))])
def test_a_backward_alone_takes_what_the_forward_keeps(peer, lse_unit, monkeypatch):
    if peer == "tokamax":
        pytest.importorskip("tokamax", reason=NO_TOKAMAX)
    # Every residual has a shape of its own, so that it can be told by it.
    case = AttentionCase(
        B=1, Hq=2, Hkv=2, Sq=128, Sk=256, D=128, Dv=256, dtype="float32", mask="full"
    )
    interpret(monkeypatch)
    q, k, v = arrays(case.inputs())
    (dout,) = arrays([case.output()], seed=1)
    out, vjp = jax.vjp(lambda *x: plain_attention(case, *x), q, k, v)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * case.scale
    lse = jax.nn.logsumexp(scores, axis=-1) / lse_unit
    kept = {x[0].shape: x[0] for x in (q * case.scale, k, v, out, lse)}
    for variant in usable(peer, case, "backward")[:2]:
        first, *residuals = variant.args
        assert (first, {x.shape for x in residuals}) == (case.output(), set(kept))
        got = variant.fn(dout, *(kept[x.shape] for x in residuals))
        for name, mine, theirs in zip(GRADS, got, vjp(dout), strict=True):
            assert_close(mine, theirs, f"{variant.name}: {name}")


@pytest.mark.parametrize("peer", KERNELS)
def test_a_backward_alone_runs_no_forward(peer):
    case = CASES["causal"]
    both, backward, forward = (
        lower(usable(peer, case, which)[0]).mlir_module().count("tpu_custom_call")
        for which in ("both", "backward", "forward")
    )
    assert forward == 1
    assert backward == both - forward


@pytest.mark.parametrize("peer", PEERS)
def test_a_mask_is_made_in_the_backward(peer):
    """As an argument, its tables would be unknown to the simulator, and its bytes would count."""
    for variant in usable(peer, CASES["causal"], "backward"):
        assert all(arg.shape and jnp.issubdtype(arg.dtype, jnp.floating) for arg in variant.args)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("peer", PEERS)
def test_variants_have_names_of_their_own_and_blocks_that_are_json(peer, which):
    case = AttentionCase.parse("B=1,Hq=8,Hkv=8,S=4096,D=128")
    variants = attention_variants(peer, case, which)
    names = [variant.name for variant in variants]
    assert len(set(names)) == len(names) > 0
    assert all(json.loads(json.dumps(v.blocks)) == v.blocks and v.source for v in variants)
    assert all(name.startswith(peer) for name in names)


@pytest.mark.parametrize("length", [1, 100, 700, 1500, 2048, 4096, 5000])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("peer", PEERS)
def test_every_length_has_a_variant(peer, which, length):
    case = AttentionCase(B=1, Hq=2, Hkv=1, Sq=length, Sk=length, D=128)
    assert usable(peer, case, which)


def test_defaults_of_jax_flash_are_among_its_variants():
    case = AttentionCase.parse("B=1,Hq=8,Hkv=8,S=4096,D=128")
    *grid, default = attention_variants("jax_flash", case, "forward")
    assert default.name == "jax_flash block_q=128 block_k_major=128 block_k=128"
    assert default.source == "BlockSizes.get_default"
    assert grid[0].blocks == {"block_q": 1024, "block_k_major": 1024, "block_k": 512}


@needs_tokamax
def test_tokamax_searches_what_the_installed_version_knows():
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as lib

    case = AttentionCase.parse("B=1,Hq=8,Hkv=8,S=4096,D=128")
    skips = [
        v for v in attention_variants("tokamax", case, "forward") if "qk_diag_skip" in v.blocks
    ]
    known = {field.name for field in dataclasses.fields(lib.SplashConfig)}
    assert bool(skips) == ("qk_diag_skip" in known)
    assert len(skips) in (0, 2)
    full = dataclasses.replace(case, mask="full")
    assert not any(
        "qk_diag_skip" in v.blocks for v in attention_variants("tokamax", full, "forward")
    )


@pytest.mark.parametrize(
    ("peer", "shape", "mask", "reason", "theirs"),
    [
        (
            "jax_flash",
            "B=1,Hq=1,Hkv=1,S=256,D=128",
            "sliding_window(9)",
            "flash_attention has no sliding window",
            None,
        ),
        (
            "jax_flash",
            "B=1,Hq=1,Hkv=1,Sq=128,Sk=256,D=128",
            "causal",
            "flash_attention's causal mask starts at the first key, so it needs Sq = Sk",
            None,
        ),
        (
            "jax_flash",
            "B=1,Hq=1,Hkv=1,S=256,D=128,Dv=64",
            "causal",
            "flash_attention needs Dv = D, got Dv=64 and D=128",
            NotImplementedError,
        ),
        (
            "xla",
            "B=1,Hq=1,Hkv=1,S=256,D=128,Dv=64",
            "causal",
            "dot_product_attention needs Dv = D, got Dv=64 and D=128",
            ValueError,
        ),
    ],
)
def test_what_a_peer_cannot_do_is_said(peer, shape, mask, reason, theirs):
    case = AttentionCase.parse(shape, mask=mask)
    variants = attention_variants(peer, case, "forward")
    assert {variant.refused for variant in variants} == {reason}
    with pytest.raises(
        ValueError, match=re.escape(f"{variants[0].name} cannot be built: {reason}")
    ):
        _ = variants[0].fn
    if theirs is not None:  # the library says so too: the day it can, this fails
        built = dataclasses.replace(variants[0], refused=None)
        with pytest.raises(theirs):
            jax.eval_shape(built.fn, *built.args)


@pytest.mark.parametrize(
    ("peer", "which", "message"),
    [
        ("flash", "forward", "peer: unknown peer 'flash'; known: tokamax, splash, jax_flash, xla"),
        (
            "splash",
            "forwards",
            "pass: unknown pass 'forwards'; known: forward, backward, both; did",
        ),
    ],
)
def test_an_unknown_name_is_refused(peer, which, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_variants(peer, CASES["causal"], which)


def test_a_missing_tokamax_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(EstimateError, match=r"tokamax.*pip install tokamax"):
        attention_variants("tokamax", CASES["causal"], "forward")


@needs_tokamax
def test_tokamax_tries_its_narrow_layout_where_a_head_is_narrow():
    def layouts(width):
        case = AttentionCase(B=1, Hq=8, Hkv=8, Sq=4096, Sk=4096, D=width)
        variants = attention_variants("tokamax", case, "forward")
        return [tuple(v.blocks.get(f"{x}_layout") for x in "qkv") for v in variants]

    assert tokamax.NARROW_LAYOUT not in layouts(128)
    assert layouts(64)[0] == layouts(192)[0] == tokamax.NARROW_LAYOUT


@needs_tokamax
def test_a_choice_of_tokamax_can_be_named():
    """As `calibrate` does with the choices of published times."""
    case = AttentionCase.parse("B=1,Hq=4,Hkv=2,S=512,D=128")
    config = {"block_q": 256, "block_kv": 512, "block_kv_compute": 128, "k_layout": "SEQ_MINOR"}
    for heads in ("mqa", "mha"):
        variant = tokamax.variant(case, "forward", config, heads, "a paper")
        assert (variant.blocks, variant.source) == ({**config, "heads": heads}, "a paper")
        assert lower(variant).out_avals[0].shape == case.output().shape
    odd = tokamax.variant(case, "forward", {**config, "block_kv_compute": 384}, "mha", "")
    with pytest.raises(ValueError, match=r"tokamax: the blocks .* do not divide one another"):
        _ = odd.fn


@needs_tokamax
def test_a_tokamax_without_splash_attention_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{tokamax.PACKAGE}.splash_attention_kernel", None)
    with pytest.raises(
        EstimateError, match=r"splash_attention_kernel cannot be imported .*0\.0\.17"
    ):
        attention_variants("tokamax", CASES["causal"], "forward")
