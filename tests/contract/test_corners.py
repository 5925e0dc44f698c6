"""What must not reach a result or a gradient: hidden keys, empty rows, score_mod's values there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.attention.tpu.scores import LN_2, LOWEST
from tests.support.budgets import judge
from tests.support.calls import call, check, program, run
from tests.support.cases import hidden_by_log, per_head
from tests.support.inputs import Inputs, Sizes, draw, normal

pytestmark = pytest.mark.slow

SIZES = Sizes(B=2, Sq=21, Sk=140, Hq=4, Hkv=2, D=8, Dv=6)
INF = np.float32(np.inf)


def poisoned(inputs: Inputs, keys=(), queries=(), value=np.nan) -> Inputs:
    """With ``value`` in these keys and values, and in these queries and their cotangents."""
    copies = {name: np.copy(x) for name, x in vars(inputs).items()}
    for j in keys:
        copies["k"][:, j] = value
        copies["v"][:, j] = value
    for i in queries:
        copies["q"][:, i] = value
        copies["dout"][:, i] = value
        copies["dlse"][:, :, i] = value
    return Inputs(**copies)


def same(got: dict, want: dict, but=()):
    for name in want:
        if name not in but:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("how", ["mask", "bias", "score_mod", "softcapped score_mod"])
def test_hidden_keys_reach_nothing(implementation, how):
    """Whole tiles of them, parts of tiles, and every query's last."""
    hidden = np.zeros(SIZES.Sk, bool)
    hidden[[0, 5, *range(60, 71), 139]] = True
    arguments: dict = {"mask": masks.causal()}
    if how == "mask":
        arguments["mask"] &= ~hidden[None, :]
    elif how == "bias":
        arguments["bias"] = np.where(hidden, -INF, np.float32(0.5))[None, :]
    else:
        table = jnp.asarray(hidden)
        arguments["score_mod"] = lambda s, b, h, i, j, w: jnp.where(table[j], -jnp.inf, s * w[h])
        arguments["captured"] = (normal(4),)
        if how == "softcapped score_mod":
            arguments["softcap"] = 2.0
    inputs, attend = draw(SIZES), program(implementation=implementation, **arguments)
    want = attend(inputs)
    for value in (np.nan, np.inf, -np.inf):
        same(attend(poisoned(inputs, keys=np.flatnonzero(hidden), value=value)), want)
    for name in ("dk", "dv"):
        assert not want[name][:, hidden].any(), f"{name} of hidden keys is not 0"


@pytest.mark.parametrize("mask", ["causal", "streaming"])
def test_keys_that_only_queries_past_the_last_would_see(implementation, mask):
    """A kernel that computes whole tiles has such queries."""
    make = {
        "causal": masks.causal,
        "streaming": lambda **i: masks.streaming(sinks=2, window=5, **i),
    }
    inputs = draw(SIZES)
    attend = program(implementation=implementation, mask=make[mask](offset=0), softcap=3.0)
    want = attend(inputs)
    same(attend(poisoned(inputs, keys=range(21, 140))), want)
    for name in ("dk", "dv"):
        assert not want[name][:, 21:].any()


@pytest.mark.parametrize("how", ["softcapped score_mod", "score_mod", "bias"])
def test_a_score_of_minus_infinity_hides_its_key_as_a_mask_does(implementation, how):
    """A single pair, in rows that see other keys: a cap of −∞ would be −c, a key like others."""
    hidden = np.random.default_rng(0).random((SIZES.Sq, SIZES.Sk)) < 0.3
    arguments: dict = {"mask": masks.causal(), "sinks": normal(4, seed="sinks")}
    if how == "bias":
        arguments["bias"] = np.where(hidden, -INF, np.float32(0.5))
    else:
        table = jnp.asarray(hidden)
        arguments["score_mod"] = lambda s, b, h, i, j, w: jnp.where(table[i, j], -jnp.inf, s * w[h])
        arguments["captured"] = (normal(4),)
        if how == "softcapped score_mod":
            arguments["softcap"] = 2.0
    check(implementation, draw(SIZES), **arguments)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_empty_rows(implementation, sinks):
    """Output 0, lse −inf or the sink logit, gradients 0, whatever query and cotangents hold."""
    arguments: dict = {"mask": masks.causal(offset=-6), "bias": normal(1, 4, 21, 140)}
    if sinks:
        arguments["sinks"] = normal(4, seed="sinks")
    inputs, attend = draw(SIZES), program(implementation=implementation, **arguments)
    got = attend(inputs)
    judge(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **arguments).check(got)
    assert not got["out"][:, :6].any()
    assert not got["dq"][:, :6].any()
    assert not got["dbias"][:, :, :6].any()
    expected = arguments["sinks"][None, :, None] if sinks else -np.inf
    assert (got["lse"][:, :, :6] == expected).all()
    # The lse of an empty row with a sink is the sink's logit: its cotangent is the sink's.
    for bad in (np.nan, np.inf):
        same(attend(poisoned(inputs, queries=range(6), value=bad)), got, but=("dsinks",))


def test_no_row_sees_anything(implementation):
    nothing = np.zeros((SIZES.Sq, SIZES.Sk), bool)
    inputs = draw(SIZES)
    inputs = poisoned(inputs, keys=range(SIZES.Sk), queries=range(SIZES.Sq))
    got = run(
        inputs,
        implementation=implementation,
        mask=nothing,
        bias=normal(21, 140),
        score_mod=hidden_by_log,
        captured=(normal(4),),
    )
    assert (got.pop("lse") == -np.inf).all()
    for name, x in got.items():
        assert not x.any(), name


def test_one_batch_entry_sees_nothing(implementation):
    """pytorch#41508: one row without a key turned all gradients into NaN."""
    got = check(implementation, draw(SIZES), mask=masks.lengths(kv=np.array([0, 77])))
    assert not any(got[name][0].any() for name in ("out", "dq", "dk", "dv"))


def test_what_score_mod_does_at_hidden_positions(implementation):
    """NaN with NaN derivatives where the mask hides, −∞ with an infinite one where it hides
    itself: 0 to every gradient, those of captured arrays too."""
    sizes = Sizes(B=2, Sq=70, Sk=70, Hq=4, Hkv=2, D=8, Dv=6)
    arguments = {"score_mod": hidden_by_log, "captured": (normal(4),), "softcap": 5.0}
    got = check(implementation, draw(sizes), mask=masks.causal(), **arguments)
    assert all(np.isfinite(x).all() for x in got.values())


def test_a_visible_key_that_is_not_finite_is_never_dropped(implementation):
    attend = program(implementation=implementation, mask=masks.full())
    # An infinite key is left out: where q·k is −∞, a weight of 0 is right.
    for name, value in (("k", np.nan), ("v", np.nan), ("v", np.inf)):
        inputs = draw(SIZES)
        getattr(inputs, name)[:, 70] = value
        assert not np.isfinite(attend(inputs)["out"]).any(), (name, value)


def test_first_visited_keys_are_hidden_in_some_rows(implementation):
    """vllm#48364: a block without a visible key, first in a row: (−∞) − (−∞)."""
    sizes = Sizes(B=1, Sq=300, Sk=300, Hq=2, Hkv=1, D=8, Dv=8)
    visible = np.tril(np.ones((300, 300), bool))
    visible[200:, :130] = False
    visible[250:, :290] = False
    visible[290:] &= np.arange(300) >= 289
    check(implementation, draw(sizes), mask=visible)


def test_values_that_are_large_do_not_add_up_before_a_key_is_seen(implementation):
    """Hidden keys that weigh 1 until a visible one comes: finite values become ∞, and ∞ · 0 NaN."""
    sizes = Sizes(B=1, Sq=300, Sk=300, Hq=1, Hkv=1, D=8, Dv=8)
    inputs = draw(sizes)
    v = np.full_like(inputs.v, 1e37)
    out = call(
        inputs.q, inputs.k, v, mask=masks.local(3, -1), scale=1e-3, implementation=implementation
    )
    np.testing.assert_allclose(out[:, 1:], v[:, 1:], rtol=1e-5)
    assert not out[:, 0].any()


def test_non_finite_cotangent_of_one_row_stays_in_it(implementation):
    """What an infinite cotangent spoils are the row's own gradients, not those of other keys."""
    inputs = draw(SIZES)
    inputs.dlse[0, 0, 0] = np.inf  # sees keys 0 to 119
    got = run(inputs, implementation=implementation, mask=masks.causal())
    assert np.isfinite(got["dq"][1]).all()
    assert np.isfinite(got["dq"][0, 1:]).all()
    assert np.isfinite(got["dk"][0, 120:]).all()
    assert np.isfinite(got["dv"]).all()


def test_gradient_through_lse_alone(implementation):
    inputs = draw(SIZES)
    inputs.dout[:] = 0
    check(
        implementation,
        inputs,
        mask=masks.causal(offset=-3),
        sinks=normal(4),
        score_mod=per_head,
        captured=(normal(4),),
    )


def test_a_loss_that_takes_exp_of_lse_of_empty_rows(implementation):
    """Its cotangent is exp(−∞) = 0 there, and 1/exp(−∞) = ∞ in another: both give 0."""
    inputs = draw(SIZES)

    def loss(q):
        _, lse = call(
            q,
            inputs.k,
            inputs.v,
            mask=masks.causal(offset=-6),
            return_lse=True,
            implementation=implementation,
        )
        return jnp.sum(jnp.log(jnp.exp(lse))[:, :, :8])

    dq = jax.grad(loss)(jnp.asarray(inputs.q))
    assert not dq[:, :6].any()
    assert np.isfinite(dq).all()
    assert dq[:, 6:8].any()


@pytest.mark.parametrize("low", [-1e4, -1e9, -1e30, float(np.finfo(np.float32).min)])
def test_rows_with_a_very_low_bias_do_no_harm(implementation, low):
    """As padding is often written. Scores are then rounded to multiples of what they differ by: the
    weights are some mean's, and a row whose cotangent is 0 adds nothing to any gradient."""
    padded = np.arange(SIZES.Sq) % 3 == 0
    bias = np.where(padded, np.float32(low), 0)[None, None, :, None]
    inputs = draw(SIZES)
    inputs.dout[:, padded], inputs.dlse[:, :, padded] = 0, 0
    got = run(inputs, implementation=implementation, bias=bias)
    want = run(inputs, implementation=implementation, bias=np.zeros_like(bias))
    for name, x in got.items():
        assert np.isfinite(x).all(), name
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-6, err_msg=name)
    np.testing.assert_allclose(got["out"][:, ~padded], want["out"][:, ~padded], atol=1e-6)
    out, v = got["out"][:, padded], inputs.v.repeat(2, 2)
    assert (out <= v.max(1, keepdims=True) + 1e-5).all()
    assert (out >= v.min(1, keepdims=True) - 1e-5).all()
    expected = low + want["lse"][:, :, padded].astype(np.float64)
    if implementation == "pallas":  # works in base 2, where float32 ends at 0.69 of its natural end
        expected = np.maximum(expected, LOWEST * LN_2)
    np.testing.assert_allclose(got["lse"][:, :, padded], expected, rtol=1e-6)


@pytest.mark.parametrize("how", ["bias", "score_mod"])
@pytest.mark.parametrize("low", [-1e9, -1e30, float(np.finfo(np.float32).min)])
def test_the_weights_of_a_row_of_very_low_scores_add_up_to_1(implementation, how, low):
    """In the backward as well, though the logarithm of their sum is lost in the logsumexp: what
    flows into all values is what flowed into the row."""
    arguments: dict = {"bias": np.full((1, 1, 1, SIZES.Sk), low, np.float32)}
    if how == "score_mod":
        arguments = {"score_mod": lambda score, *_: jnp.maximum(score + low, low)}
    inputs = draw(SIZES)
    got = run(inputs, implementation=implementation, **arguments)
    want = inputs.dout.sum(1).reshape(SIZES.B, SIZES.Hkv, -1, SIZES.Dv).sum(2)
    np.testing.assert_allclose(got["dv"].sum(1), want, atol=1e-4)
    # All weights are equal, so that this is plain attention without scores.
    flat = run(inputs, implementation=implementation, score_mod=lambda score, *_: 0.0 * score)
    np.testing.assert_allclose(got["out"], flat["out"], atol=1e-5)
    np.testing.assert_allclose(got["dv"], flat["dv"], atol=1e-5)


# Each: a score function, its array, and a mask. Where nobody sees, a derivative is infinite.
INFINITE = {
    "by distance": (
        lambda s, b, h, i, j, w: s - jnp.log(1 + w[h] * (i - j)),
        np.full(4, 0.5, np.float32),
        masks.causal(offset=0),
    ),
    "by key": (
        lambda s, b, h, i, j, w: s + jnp.log(w[j]),
        (np.arange(140) < 90).astype(np.float32),
        None,
    ),
    "by query": (
        lambda s, b, h, i, j, w: s * jnp.sqrt(w[i]),
        (np.arange(21) < 13).astype(np.float32),
        masks.lengths(q=13),
    ),
    "by head": (
        lambda s, b, h, i, j, w: s * jnp.sqrt(w[h]),
        np.array([1, 0, 2, 3], np.float32),
        np.array([True, False, True, True])[:, None, None],
    ),
    "nothing is seen": (
        lambda s, b, h, i, j, w: s * jnp.sqrt(w),
        np.float32(0),
        masks.lengths(q=0),
    ),
}


@pytest.mark.parametrize("name", INFINITE)
def test_infinite_derivatives_where_nobody_sees_reach_no_array(implementation, name):
    score_mod, array, mask = INFINITE[name]
    got = run(
        draw(SIZES),
        implementation=implementation,
        score_mod=score_mod,
        captured=(array,),
        mask=mask,
    )
    want = run(
        draw(SIZES), implementation="reference", score_mod=score_mod, captured=(array,), mask=mask
    )
    assert np.isfinite(want["captured0"]).all()
    np.testing.assert_allclose(got["captured0"], want["captured0"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("read", ["by head", "by distance", "taken twice"])
def test_gradients_of_half_precision_arrays_are_summed_in_float32(implementation, read):
    """In bfloat16 a sum of ones ends at 256."""
    score_mod = {
        "by head": lambda s, b, h, i, j, w: s + w[h],
        "by distance": lambda s, b, h, i, j, w: (
            s + jnp.tanh(w.astype(jnp.float32)[h] * (j - i) * 0.01) + w[h]
        ),
        "taken twice": lambda s, b, h, i, j, w: (
            s + jnp.take(w, h) * w.astype(jnp.float32)[h] + w[0]
        ),
    }[read]
    inputs = draw(Sizes(B=1, Sq=300, Sk=160, Hq=2, Hkv=1, D=8, Dv=8))
    inputs.dlse[...] = 1
    inputs.dout[...] = 0
    arguments = {"implementation": implementation, "score_mod": score_mod}
    got, want = (
        run(inputs, captured=(np.array([1, 1], dtype),), **arguments)["captured0"]
        for dtype in (jnp.bfloat16, np.float32)
    )
    assert got.dtype == jnp.bfloat16
    assert abs(want).max() > 256
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=2)


def test_sinks_of_minus_infinity_are_the_lse_of_empty_rows(implementation):
    """Whose derivative is then 1, as of any other sink."""
    inputs = draw(SIZES)
    sinks = np.array([-INF, 0.5, -INF, 0], np.float32)
    got = run(inputs, implementation=implementation, mask=masks.lengths(q=13), sinks=sinks)
    assert (got["lse"][:, [0, 2], 13:] == -INF).all()
    want = inputs.dlse[:, [0, 2], 13:].sum((0, 2))
    np.testing.assert_allclose(got["dsinks"][[0, 2]], want, rtol=1e-5)
