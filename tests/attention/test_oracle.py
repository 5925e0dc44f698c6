"""The oracle against what it does not use: a textbook formula, loops, and differences."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.attention.oracle import oracle
from tests.support.cases import hidden_by_log, relative
from tests.support.inputs import Sizes, draw, normal

SIZES = Sizes(B=2, Sq=5, Sk=7, Hq=4, Hkv=2, D=3, Dv=2)
TABLE, TEMPERATURE = normal(13, seed="table"), normal(seed="t").reshape(())
ALL = {
    "mask": masks.causal(offset=1),
    "segment_ids": (
        np.array([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]], np.int32),
        np.array([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 1, 0]], np.int32),
    ),
    "score_mod": relative,
    "captured": (TABLE, TEMPERATURE),
    "bias": normal(1, 4, 5, 7, seed="bias"),
    "softcap": 1.7,
    "scale": 0.8,
    "sinks": normal(4, seed="sinks"),
}


def by_hand(q, k, v, b, i, h) -> tuple[np.ndarray, float]:
    """One row of `ALL`, with Python's floats."""
    q_ids, kv_ids = ALL["segment_ids"]
    terms, value = [], np.zeros(2)
    for j in range(7):
        if j > i + 1 or q_ids[b, i] != kv_ids[b, j] or q_ids[b, i] < 0:
            continue
        score = 0.8 * math.fsum(
            float(x) * float(y) for x, y in zip(q[b, i, h], k[b, j, h // 2], strict=True)
        )
        score = score * float(TEMPERATURE) + float(TABLE[i - j + 6])
        score = 1.7 * math.tanh(score / 1.7) + float(ALL["bias"][0, h, i, j])
        terms.append(math.exp(score))
        value += terms[-1] * v[b, j, h // 2].astype(float)
    total = math.fsum(terms) + math.exp(float(ALL["sinks"][h]))
    return value / total, math.log(total)


def test_results_by_hand():
    inputs = draw(SIZES)
    result = oracle(inputs.q, inputs.k, inputs.v, **ALL)
    for b, i, h in np.ndindex(2, 5, 4):
        out, lse = by_hand(inputs.q, inputs.k, inputs.v, b, i, h)
        np.testing.assert_allclose(result.out[b, i, h], out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(result.lse[b, h, i], lse, rtol=1e-12)


def test_gradients_by_differences():
    inputs = draw(SIZES)
    arrays = {name: getattr(inputs, name).astype(np.float64) for name in "qkv"}
    arrays |= {name: ALL[name].astype(np.float64) for name in ("bias", "sinks")}
    arrays |= {"table": TABLE.astype(np.float64), "temperature": TEMPERATURE.astype(np.float64)}

    def call(arrays, **cotangents):
        rest = {n: x for n, x in ALL.items() if n not in ("bias", "sinks", "captured")}
        captured = arrays["table"], arrays["temperature"]
        q, k, v, bias, sinks = (arrays[n] for n in ("q", "k", "v", "bias", "sinks"))
        return oracle(q, k, v, bias=bias, sinks=sinks, captured=captured, **rest, **cotangents)

    def loss(arrays):
        result = call(arrays)
        return np.sum(result.out * inputs.dout) + np.sum(result.lse * inputs.dlse)

    result = call(arrays, dout=inputs.dout, dlse=inputs.dlse)
    found = dict(zip(arrays, (*result[2:7], *result.dcaptured), strict=True))
    for name, x in arrays.items():
        for seed in range(3):
            direction = normal(*x.shape, seed=seed).astype(np.float64)
            ahead, behind = ({**arrays, name: x + t * direction} for t in (1e-5, -1e-5))
            slope = (loss(ahead) - loss(behind)) / 2e-5
            np.testing.assert_allclose(np.sum(found[name] * direction), slope, rtol=1e-7, atol=1e-8)


def test_layouts_agree():
    first, second = (draw(SIZES, layout=layout) for layout in ("BSHD", "BHSD"))
    swapped = {name: np.swapaxes(getattr(first, name), 1, 2) for name in ("q", "k", "v", "dout")}
    for name, x in swapped.items():
        setattr(second, name, x)
    bshd = oracle(first.q, first.k, first.v, dout=first.dout)
    bhsd = oracle(second.q, second.k, second.v, dout=second.dout, layout="BHSD")
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(bhsd, name), np.swapaxes(getattr(bshd, name), 1, 2))


def test_hidden_and_empty():
    inputs = draw(SIZES)
    inputs.k[:, 6] = np.nan
    inputs.v[:, 6] = np.inf
    inputs.q[:, 0] = np.nan
    inputs.dout[:, 0] = np.nan
    inputs.dlse[:, :, 0] = np.inf
    result = oracle(
        inputs.q,
        inputs.k,
        inputs.v,
        mask=masks.causal(offset=-1),
        score_mod=hidden_by_log,
        captured=(normal(4),),
        dout=inputs.dout,
        dlse=inputs.dlse,
    )
    assert not result.visible[:, :, 0].any()
    assert (result.lse[:, :, 0] == -np.inf).all()
    assert not result.out[:, 0].any()
    assert not result.dq[:, 0].any()
    assert not result.dk[:, 3:].any()
    assert not result.dv[:, 3:].any()
    for x in (result.dq, result.dk, result.dv, *result.dcaptured):
        assert np.isfinite(x).all()


def test_a_cap_does_not_bring_back_what_score_mod_hides():
    def score_mod(score, b, h, q_idx, kv_idx):
        return jnp.where(kv_idx <= q_idx, score, -jnp.inf)

    inputs = draw(SIZES)
    call = {"softcap": 2.0, "dout": inputs.dout}
    qkv = inputs.q, inputs.k, inputs.v
    hidden = oracle(*qkv, score_mod=score_mod, **call)
    masked = oracle(*qkv, mask=masks.causal(offset=0), **call)
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(hidden, name), getattr(masked, name), atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision(dtype):
    """float64 throughout; what is stored in between, only where asked for."""
    inputs = draw(Sizes(B=1, Sq=64, Sk=64), dtype=dtype)
    qkv = inputs.q, inputs.k, inputs.v
    exact = oracle(*qkv, dout=inputs.dout)
    assert {x.dtype for x in exact[:5]} == {np.dtype(np.float64)}
    assert exact.out.astype(np.float32).tolist() != exact.out.tolist()
    plain = oracle(*qkv, dout=inputs.dout, compute_dtype=np.float32, storage_dtype=inputs.q.dtype)
    for name in ("out", "dq", "dk", "dv"):
        error = np.abs(getattr(plain, name) - getattr(exact, name)).max()
        assert (1e-8, 1e-4)[dtype == "bfloat16"] < error < (1e-5, 1e-1)[dtype == "bfloat16"], name
