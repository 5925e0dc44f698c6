"""The budget lets the plain computation pass and wrong ones fail."""

import dataclasses

import numpy as np
import pytest

from . import oracle

CASE = oracle.draw(S=33, Hq=4, Hkv=2, D=16)


def values(low):
    return tuple(None if pair is None else pair[0] for pair in low)


def drop_last_token(case):
    """The gradient of a scale that forgets the last of 33 tokens."""
    trimmed = dataclasses.replace(
        case,
        q=case.q[:, :-1],
        k=case.k[:, :-1],
        v=case.v[:, :-1],
        cotangents=tuple(x[:, :, :-1] for x in case.cotangents),
    )
    grads = list(values(oracle.plain(case)[1]))
    grads[3:] = values(oracle.plain(trimmed)[1])[3:]
    return values(oracle.plain(case)[0]), grads


def with_case(**changes):
    return lambda case: map(values, oracle.plain(dataclasses.replace(case, **changes)))


def one_value(case):
    """A single lane off by a thousandth."""
    outputs, grads = map(values, oracle.plain(case))
    outputs[0][1, 2, 5, 3] *= np.float32(1.001)
    return outputs, grads


WRONG = {
    "positions from 1": (with_case(positions=np.arange(1, 34)), {"q", "k", "dq", "dq_scale"}),
    "rotated backwards": (with_case(positions=-np.arange(33)), {"q", "k", "dq", "dq_scale"}),
    "another theta": (with_case(rope_theta=10_100.0), {"q", "k", "dq"}),
    "another epsilon": (with_case(norm_eps=1e-5), {"q", "k", "dq"}),
    "the other pairs": (with_case(rope_interleaved=True), {"q", "k", "dq", "dk", "dq_scale"}),
    "fewer lanes turn": (with_case(rotary_dim=14), {"q", "k", "dq", "dk", "dq_scale"}),
    "an offset": (with_case(position_offset=1), {"q", "k", "dq", "dk", "dq_scale"}),
    "not normalised": (with_case(norm_eps=None), {"q", "k", "dq", "dk", "dq_scale"}),
    "no scale": (with_case(q_scale=np.ones(16, np.float32)), {"q", "dq"}),
    "a token left out of the scale's gradient": (drop_last_token, {"dq_scale", "dk_scale"}),
    "one value": (one_value, {"q"}),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"rope_interleaved": True, "rotary_dim": 10, "position_offset": np.array([7, 100])},
        {"norm_eps": None},
    ],
)
def test_the_plain_computation_is_within_the_budget(options):
    case = oracle.draw(S=33, D=16, **options)
    outputs, grads = map(values, oracle.plain(case))
    assert max(oracle.excesses(case, outputs, grads).values()) <= 1 / oracle.FACTOR


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_computation_is_not(name):
    compute, expected = WRONG[name]
    outputs, grads = compute(CASE)
    found = {n for n, e in oracle.excesses(CASE, outputs, grads).items() if e > 1}
    assert expected <= found


@pytest.mark.parametrize("options", [{}, {"rope_interleaved": True, "rotary_dim": 4}])
def test_complex_steps_agree_with_finite_differences(options):
    case = oracle.draw(B=1, S=3, Hq=1, Hkv=1, D=6, **options)
    grads = oracle.gradients(case)
    for i, name in enumerate(oracle.NAMES):
        x = getattr(case, name).astype(np.float64)
        direction = np.random.default_rng(i).normal(size=x.shape)

        def loss(step, name=name, x=x, direction=direction):
            moved = dataclasses.replace(case, **{name: x + step * direction})
            pairs = zip(oracle.exact(moved), case.cotangents, strict=True)
            return sum(np.sum(out * cotangent) for out, cotangent in pairs)

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.sum(grads[i] * direction), slope, rtol=1e-7, atol=1e-8)
