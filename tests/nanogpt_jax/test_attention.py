"""attention.impl and attention.preprocess: the same numbers, and no silent choice."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import smalti.masks
from nanogpt_jax.attention import _kernel, count_visible_pairs, make_attention, masked_softmax
from nanogpt_jax.config import UserError
from nanogpt_jax.model import cross_entropy

from .conftest import tiny_config
from .test_model import RANDOM, compiled, random_params, tokens_of


def loss_and_grad(config, params):
    compiled(config)  # not under a trace, where a mask cannot be counted

    def loss(params, inputs, targets):
        return cross_entropy(compiled(config)(params, inputs), targets).mean()

    return jax.jit(jax.value_and_grad(loss))(params, tokens_of(), tokens_of(1))


def assert_same_training(a, b):
    params = random_params(a)
    (loss_a, grad_a), (loss_b, grad_b) = loss_and_grad(a, params), loss_and_grad(b, params)
    np.testing.assert_allclose(loss_a, loss_b, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(grad_a), jax.tree.leaves(grad_b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


STREAMING = ("attention.sink_tokens=2", "attention.window=5")


@pytest.mark.parametrize(
    ("impl", "same_as_xla_with"),
    [
        (("attention.impl=ours",), ()),
        (
            ("attention.impl=streaming", *STREAMING),
            ("attention.mask=streaming(sinks=2, window=5)",),
        ),
        (
            ("attention.impl=flex", "attention.mask=local(3, 3) & causal()"),
            ("attention.mask=sliding_window(4)",),
        ),
        (("attention.impl=xla", "attention.preprocess=pallas"), ()),
        (("attention.impl=ours", "attention.interpret=true"), ()),
        (
            ("attention.impl=streaming", *STREAMING, "attention.interpret=true"),
            ("attention.mask=streaming(sinks=2, window=5)",),
        ),
        (("attention.impl=ours", "attention.preprocess=pallas", "attention.interpret=true"), ()),
    ],
    ids=["ours", "streaming", "flex", "pallas preprocess", "kernels", "streaming kernels", "both"],
)
def test_loss_and_gradients_equal_those_of_xla(impl, same_as_xla_with):
    assert_same_training(tiny_config(RANDOM, *impl), tiny_config(RANDOM, *same_as_xla_with))


def test_a_window_differs_from_causal():
    """The tests above would pass if every mask were ignored."""
    causal, window = tiny_config(RANDOM), tiny_config(RANDOM, "attention.mask=sliding_window(4)")
    params = random_params(causal)
    assert loss_and_grad(causal, params)[0] != loss_and_grad(window, params)[0]


@pytest.mark.parametrize("S", [1, 7, 64, 1500])
def test_visible_pairs_in_closed_form(S):
    assert count_visible_pairs("causal()", S, rows=100) == S * (S + 1) // 2
    w = 5
    short = min(S, w)
    window = short * (short + 1) // 2 + (S - short) * w
    assert count_visible_pairs(f"sliding_window({w})", S, rows=100) == window


def test_a_mask_that_shows_the_future_is_refused():
    with pytest.raises(UserError) as error:
        make_attention(tiny_config("attention.mask=local(2, 1)"))
    assert str(error.value) == (
        "attention.mask: in 'local(2, 1)' query 0 sees key 1, which comes later: a language model "
        "would read its own target; add '& causal()'"
    )


def test_documents_are_as_long_as_a_sequence():
    fits = "document(lengths=[10, 6]) & causal()"
    assert count_visible_pairs(fits, 16) == 10 * 11 // 2 + 6 * 7 // 2
    with pytest.raises(
        UserError, match=r"attention.mask: document: its lengths sum to 16; .* must sum to Sq = 17"
    ):
        count_visible_pairs(fits, 17)


def test_a_mask_that_hides_everything_is_refused():
    with pytest.raises(UserError, match="hides every key from every query of 16: nothing would"):
        make_attention(tiny_config("attention.impl=flex", "attention.mask=causal() & ~causal()"))


@pytest.mark.parametrize("impl", ["jax_flash", "splash"])
def test_what_needs_a_tpu_says_so(impl):
    with pytest.raises(UserError) as error:
        make_attention(tiny_config(f"attention.impl={impl}"))
    assert str(error.value) == (
        f"attention.impl: got '{impl}', a kernel of jax for TPUs, on platform 'cpu'; use 'ours' "
        "or 'xla' here"
    )


def test_default_checks_wherever_they_can_be():
    """Of `shard_map`: a sum over devices that was forgotten is an error then."""
    checks = {
        overrides: make_attention(tiny_config(*overrides)).check_vma
        for overrides in (
            ("attention.impl=ours",),
            ("attention.impl=ours", "attention.interpret=true"),
            ("attention.impl=ours", "attention.preprocess=pallas"),
        )
    }
    assert [*checks.values()] == [True, True, True]


def test_the_log_says_what_runs_and_why():
    config = tiny_config("attention.impl=ours", "attention.preprocess=pallas")
    impl, mask, preprocess = make_attention(config).description
    assert impl.startswith("attention.impl=ours: smalti.attention, blockwise on cpu: ")
    assert mask == "attention.mask: causal() leaves 53.1% of 16 × 16"
    assert preprocess.startswith("attention.preprocess=pallas: smalti's Pallas kernels")
    assert "interpret mode" in preprocess
    kernels = tiny_config("attention.impl=ours", "attention.interpret=true")
    assert make_attention(kernels).description[0] == (
        "attention.impl=ours: smalti.attention, pallas on cpu: named by the caller, in interpret "
        "mode (slow)"
    )
    impl, _, preprocess = make_attention(tiny_config()).description
    assert impl == "attention.impl=xla: masked softmax over all S × S scores"
    assert preprocess == "attention.preprocess=xla: the formula in plain JAX, which XLA fuses"


@pytest.mark.parametrize("impl", ["jax_flash", "splash"])
def test_the_kernels_of_jax_compute_the_same(impl):
    """In TPU interpret mode, as if on a TPU: their scale, heads and mask are as ours."""
    kernel, _ = _kernel(tiny_config(f"attention.impl={impl}").attention, "tpu", 128)
    *arrays, dout = (
        jax.random.normal(key, (1, heads, 128, 128))
        for key, heads in zip(jax.random.split(jax.random.key(0), 4), (2, 1, 1, 2), strict=True)
    )
    expected, pull = jax.vjp(partial(masked_softmax, mask=smalti.masks.causal()), *arrays)
    with pltpu.force_tpu_interpret_mode():
        out, pull_out = jax.vjp(kernel, *arrays)
        gradients = pull_out(dout)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for gradient, wanted in zip(gradients, pull(dout), strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=2e-5)
