"""The public function: right in every implementation, clear about what it cannot do."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from smalti.preprocess import qk_norm_rope

from . import calls, oracle

CASES = {
    "one of everything": {"B": 1, "S": 1, "Hq": 1, "Hkv": 1, "D": 2, "Dv": 1},
    "odd length, grouped heads": {"B": 2, "S": 37, "Hq": 6, "Hkv": 2, "D": 16, "Dv": 10},
    "no scales": {"S": 5, "Hq": 2, "Hkv": 2, "D": 80, "scales": False},
    "bfloat16": {"S": 19, "Hq": 4, "Hkv": 1, "D": 64, "dtype": "bfloat16"},
    "far, unordered, negative": {
        "S": 6,
        "positions": np.array([[0, 5000, 3, -70, 100_000, 2], [9, 8, 7, 6, 5, 4]], np.int32),
    },
}


def assert_within_budget(implementation, case):
    outputs, grads = calls.with_gradients(calls.public(implementation, **case.options), case)
    found = oracle.excesses(case, outputs, grads)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("implementation", calls.IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_within_the_budget(implementation, name):
    assert_within_budget(implementation, oracle.draw(**CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", calls.IMPLEMENTATIONS)
def test_any_shape_is_within_the_budget(implementation):
    @hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        st.fixed_dictionaries(
            {
                "B": st.integers(1, 3),
                "S": st.integers(1, 70),
                "Hkv": st.integers(1, 3),
                "D": st.integers(1, 40).map(lambda half: 2 * half),
                "Dv": st.integers(1, 40),
                "dtype": st.sampled_from(["float32", "bfloat16"]),
                "scales": st.booleans(),
                "norm_eps": st.sampled_from([1e-6, 1e-2]),
                "rope_theta": st.sampled_from([100.0, 1e6]),
                "seed": st.integers(0, 99),
            }
        ),
        st.integers(1, 3),
    )
    def check(sizes, group):
        assert_within_budget(implementation, oracle.draw(Hq=group * sizes["Hkv"], **sizes))

    check()


@pytest.mark.parametrize("implementation", calls.IMPLEMENTATIONS)
def test_position_zero_does_not_turn(implementation):
    case = oracle.draw(S=3, scales=False, positions=np.zeros(3, np.int32))
    q, _, v = calls.IMPLEMENTATIONS[implementation](
        case.q, case.k, case.v, positions=case.positions
    )
    x = case.q.astype(np.float64)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(q, expected.transpose(0, 2, 1, 3), rtol=1e-6)
    np.testing.assert_array_equal(v, case.v.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("implementation", calls.IMPLEMENTATIONS)
def test_scales_are_read_and_differentiated_in_their_own_dtype(implementation):
    case = oracle.draw()
    narrow = case.q_scale.astype(jnp.bfloat16)

    @jax.jit
    def gradients(narrow):
        def loss(q_scale):
            q, *_ = calls.IMPLEMENTATIONS[implementation](case.q, case.k, case.v, q_scale=q_scale)
            return jnp.sum(q * case.cotangents[0])

        return jax.grad(loss)(narrow), jax.grad(loss)(narrow.astype(jnp.float32))

    low, high = gradients(narrow)
    assert low.dtype == jnp.bfloat16
    # Summed in float32, rounded once.
    np.testing.assert_array_equal(low, high.astype(jnp.bfloat16))


def test_none_picks_by_the_platform_of_the_mesh_in_context():
    case = oracle.draw()
    arrays = case.q, case.k, case.v
    for got, expected in zip(
        qk_norm_rope(*arrays), qk_norm_rope(*arrays, implementation="xla"), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, platform="tpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert "pallas_call" in str(jax.make_jaxpr(qk_norm_rope)(*arrays))
        half = [x.astype(np.float16) for x in arrays]
        assert "pallas_call" not in str(jax.make_jaxpr(qk_norm_rope)(*half))


Q, K, V = (np.zeros((2, 5, heads, 8), np.float32) for heads in (4, 2, 2))
W = np.ones(8, np.float32)
REFUSED = [
    ({"q": Q[0]}, "q: got shape (5, 4, 8); it must be [B, S, H, D] without an empty axis. Split"),
    ({"k": K[:, :0]}, "k: got shape (2, 0, 2, 8); it must be [B, S, H, D] without an empty"),
    ({"q": Q.astype(int)}, "q: got dtype int32 (q has int32); q, k and v must share one of float"),
    ({"v": V.astype(np.float16)}, "v: got dtype float16 (q has float32); q, k and v must share"),
    ({"k": K[:, :4], "v": V[:, :4]}, "q, k, v: got [B, S] of (2, 5), (2, 4) and (2, 4); they must"),
    ({"k": K[..., :6]}, "k: got head size 6; it must be q's, 8, for scores are their product."),
    (
        {"q": Q[..., :7], "k": K[..., :7]},
        "q, k: got head size D=7; it must be even, because RoPE turns pairs (i, i + D/2). Use an "
        "even head size.",
    ),
    ({"v": V[:, :, :1]}, "v: got 1 heads; it must have as many as k, 2. Check the reshape"),
    ({"q": Q[:, :, :3]}, "q: got 3 heads over 2 heads of k and v; the former must be a multiple"),
    ({"q_scale": W[:4]}, "q_scale: got float32[4]; it must be floating [D=8], shared by all heads"),
    ({"k_scale": W.astype(int)}, "k_scale: got int32[8]; it must be floating [D=8]"),
    (
        {"positions": np.arange(4)},
        "positions: got int32[4]; it must be integer [S=5] or [B=2, ",
    ),
    ({"positions": np.arange(5.0)}, "positions: got float32[5]; it must be integer [S=5]"),
    ({"norm_eps": 0.0}, "norm_eps: got 0.0; it must be positive and finite. Leave it out"),
    ({"rope_theta": float("nan")}, "rope_theta: got nan; it must be positive and finite."),
    (
        {"implementation": "palas"},
        "implementation: got 'palas'; it must be one of ('xla', 'pallas') or None. Did you mean "
        "'pallas'?",
    ),
    ({"implementation": "gpu"}, "implementation: got 'gpu'; it must be one of ('xla', 'pallas')"),
    ({"implementation": "pallas", "interpret": "yes"}, "interpret: got 'yes'; it must be True"),
    (
        {"interpret": True},
        "interpret: got True with implementation=None; only Pallas kernels can be interpreted. "
        "Pass implementation='pallas' as well, or leave it out.",
    ),
    ({"implementation": "xla", "interpret": pltpu.InterpretParams()}, "implementation='xla'; only"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m.split(";")[0] for _, m in REFUSED])
def test_wrong_arguments_are_value_errors(changes, message):
    arguments = {"q": Q, "k": K, "v": V} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        qk_norm_rope(**arguments)


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta"])
def test_constants_are_python_floats(name):
    with pytest.raises(TypeError, match=rf"{name}: got a \w+; it must be a Python float, fixed"):
        qk_norm_rope(Q, K, V, **{name: jnp.float32(1)})


def test_pallas_never_falls_back():
    with pytest.raises(
        NotImplementedError,
        match=re.escape(
            "implementation: got 'pallas' on platform 'cpu'; the kernels compile for TPUs only. "
            "Pass interpret=True to run them slowly here, or implementation='xla'."
        ),
    ):
        qk_norm_rope(Q, K, V, implementation="pallas")
    half = [x.astype(np.float16) for x in (Q, K, V)]
    with pytest.raises(NotImplementedError, match=r"got dtype float16; .* Use bfloat16, or"):
        qk_norm_rope(*half, implementation="pallas", interpret=True)
