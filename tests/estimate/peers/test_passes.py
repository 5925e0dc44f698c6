import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.estimate.peers import AttentionCase
from smalti.estimate.peers.passes import program
from tests.estimate.peers.support import arrays

CASE = AttentionCase.parse("B=1,Hq=2,Hkv=1,Sq=3,Sk=5,D=4,Dv=6", dtype="float32", mask="full")
TABLE = np.arange(3, dtype=np.float32)


@jax.custom_vjp
def forward(q, k, v):
    return _forward(q, k, v)[0]


def _forward(q, k, v):
    out = q @ k.mT @ v * TABLE[:, None]
    # The same array twice, and what depends on no argument: a table, a sum, a number.
    return out, (q, q, k, v, jnp.asarray(TABLE), jnp.ones(2).sum())


def _backward(kept, dout):
    q, again, k, v, table, two = kept
    dout = dout * table[:, None]
    dq = dout @ (k.mT @ v).mT
    return (
        (dq + dq) / two + 0 * again,
        (v @ (q.mT @ dout).mT).sum(1, keepdims=True),
        (k @ q.mT @ dout).sum(1, keepdims=True),
    )


forward.defvjp(_forward, _backward)


def test_forward_and_both():
    q, k, v, dout = arrays((*CASE.inputs(), CASE.output()))
    fn, args = program("name", forward, CASE, "forward")
    assert (fn.__name__, args) == ("name_forward", CASE.inputs())
    out = fn(q, k, v)
    fn, args = program("name", forward, CASE, "both")
    assert (fn.__name__, args) == ("name_both", (*CASE.inputs(), CASE.output()))
    got = fn(q, k, v, dout)
    expected = jax.vjp(lambda q, k, v: q @ k.mT @ v * TABLE[:, None], q, k, v)[1](dout)
    np.testing.assert_array_equal(got[0], out)
    for mine, theirs in zip(got[1:], expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_backward_takes_each_residual_once_and_no_constant():
    q, k, v, dout = arrays((*CASE.inputs(), CASE.output()))
    fn, args = program("name", forward, CASE, "backward")
    assert fn.__name__ == "name_backward"
    assert args == (CASE.output(), *CASE.inputs())
    expected = program("name", forward, CASE, "both")[0](q, k, v, dout)[1:]
    got = jax.jit(fn)(dout, q, k, v)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_an_unknown_pass_is_refused():
    message = "pass: unknown value 'back'; known: forward, backward, both; did you mean 'backward'?"
    with pytest.raises(ValueError, match=re.escape(message)):
        program("name", forward, CASE, "back")
