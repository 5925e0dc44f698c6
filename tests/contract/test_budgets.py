"""The error budgets catch what they are for. Needs no implementation: the wrong results are the
oracle's own, changed."""

import numpy as np
import pytest

from smalti import masks
from smalti.attention.oracle import oracle
from tests.support.budgets import Judge, judge
from tests.support.inputs import DTYPES, Sizes, draw

LONG = Sizes(B=1, Sq=2048, Sk=2048, Hq=1, Hkv=1, D=64, Dv=64)
SHORT = Sizes(B=1, Sq=200, Sk=200, Hq=2, Hkv=1, D=16, Dv=16)
NAMES = ("out", "lse", "dq", "dk", "dv")


def tensors(result, dtype) -> dict:
    """A result as an implementation would give it."""
    stored = {name: getattr(result, name).astype(DTYPES[dtype]) for name in NAMES}
    return {**stored, "lse": result.lse.astype(np.float32)}


def caught(judge: Judge, wrong: dict) -> set[str]:
    return {excess.tensor for excess in judge.excesses(wrong)}


def case(sizes, dtype, **arguments):
    inputs = draw(sizes, dtype=dtype)
    call = {"dout": inputs.dout, "dlse": inputs.dlse}
    qkv = inputs.q, inputs.k, inputs.v

    def answer(**changes):
        return oracle(*qkv, **{**call, **arguments, **changes})

    return inputs, judge(*qkv, **call, **arguments), answer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def long_case(request):
    return request.param, *case(LONG, request.param, mask=masks.causal())


def test_what_is_right_passes(long_case):
    """The exact answer, and the answer of weights and score gradients stored in low precision."""
    dtype, inputs, judge_, _ = long_case
    assert not judge_.excesses(tensors(judge_.exact, dtype))
    plain = oracle(
        inputs.q,
        inputs.k,
        inputs.v,
        mask=masks.causal(),
        dout=inputs.dout,
        dlse=inputs.dlse,
        compute_dtype=np.float32,
        storage_dtype=DTYPES[dtype],
    )
    assert not judge_.excesses(tensors(plain, dtype))


def test_a_dropped_block_of_128_keys_in_late_rows(long_case):
    dtype, _, judge_, answer = long_case
    visible = np.tri(2048, dtype=bool)
    visible[1920:, 640:768] = False
    wrong = tensors(answer(mask=visible), dtype)
    assert caught(judge_, wrong) == set(NAMES)


def test_dropped_sink_tokens(long_case):
    dtype, _, judge_, answer = long_case
    visible = np.tri(2048, dtype=bool)
    visible[1024:, :4] = False
    assert caught(judge_, tensors(answer(mask=visible), dtype)) == set(NAMES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [63, 65])
def test_a_window_off_by_one(dtype, window):
    _, judge_, answer = case(SHORT, dtype, mask=masks.sliding_window(64))
    wrong = tensors(answer(mask=masks.sliding_window(window)), dtype)
    assert caught(judge_, wrong) == set(NAMES)


WRONG = {
    "no scale in dq": ("dq", lambda t: {"dq": t["dq"] * 4}),
    "dk scaled twice": ("dk", lambda t: {"dk": t["dk"] / 4}),
    "lse in base 2": ("lse", lambda t: {"lse": t["lse"] / np.log(2)}),
    "lse without the maximum": ("lse", lambda t: {"lse": t["lse"] - 1}),
    "zeros": ("out", lambda t: {"out": t["out"] * 0}),
    "NaN": ("out", lambda t: {"out": t["out"] * np.nan}),
    "one NaN": ("dv", lambda t: {"dv": np.where(np.arange(16) == 3, np.nan, t["dv"])}),
    "heads swapped": ("out", lambda t: {"out": t["out"][:, :, ::-1]}),
    "dv of one of two heads": ("dv", lambda t: {"dv": t["dv"] / 2}),
    "a few bits too few": ("out", lambda t: {"out": _coarse(t["out"])}),
}


def _coarse(x):
    """Rounded to 18 bits (float32) or 5 (bfloat16)."""
    bits = 18 if x.dtype == np.float32 else 5
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits).astype(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_caught(dtype, name):
    tensor, change = WRONG[name]
    _, judge_, _ = case(SHORT, dtype, mask=masks.causal())
    right = tensors(judge_.exact, dtype)
    assert not judge_.excesses(right)
    changed = {n: x.astype(right[n].dtype) for n, x in change(right).items()}
    assert caught(judge_, {**right, **changed}) == {tensor}


def test_gradients_without_the_softcap_or_the_cotangent_of_lse():
    _, judge_, answer = case(SHORT, "float32", mask=masks.causal(), softcap=2.0)
    right = tensors(judge_.exact, "float32")
    no_derivative = judge_.exact.dscores / np.sqrt(16)
    q = draw(SHORT).q.astype(np.float64).swapaxes(1, 2)
    dk = (no_derivative.swapaxes(2, 3) @ q).sum(1, keepdims=True).swapaxes(1, 2)
    assert caught(judge_, {**right, "dk": dk.astype(np.float32)}) == {"dk"}
    no_dlse = tensors(answer(dlse=None), "float32")
    assert caught(judge_, no_dlse) == {"dq", "dk"}


def test_rows_and_keys_of_no_pair_must_be_exactly_zero():
    _, judge_, _ = case(SHORT, "float32", mask=masks.causal(offset=-2))
    right = tensors(judge_.exact, "float32")
    assert not judge_.excesses(right)
    for name, index in (("out", (0, 1)), ("dq", (0, 0)), ("dk", (0, 199)), ("dv", (0, 198))):
        wrong = right[name].copy()
        wrong[index] = 1e-30
        assert caught(judge_, {**right, name: wrong}) == {name}
