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
    "interleaved": {"S": 11, "Hq": 3, "Hkv": 3, "D": 32, "rope_interleaved": True},
    "partial": {"S": 11, "D": 24, "rotary_dim": 6, "dtype": "bfloat16"},
    "partial, interleaved, far": {
        "D": 64,
        "Hq": 2,
        "rotary_dim": 16,
        "rope_interleaved": True,
        "position_offset": 123_456,
    },
    "an offset for each sequence": {"S": 7, "position_offset": np.array([-3, 4000], np.int32)},
    "positions and an offset": {"S": 3, "positions": np.array([4, 1, 9]), "position_offset": 50},
    "rotation alone": {"S": 9, "norm_eps": None, "scales": False, "rotary_dim": 4},
    "scaled, not normalised": {"S": 9, "D": 10, "norm_eps": None, "rope_interleaved": True},
    "a head of 256": {"B": 1, "S": 5, "Hq": 2, "Hkv": 1, "D": 256, "rope_interleaved": True},
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
                "norm_eps": st.sampled_from([1e-6, 1e-2, None]),
                "rope_theta": st.sampled_from([100.0, 1e6]),
                "rope_interleaved": st.booleans(),
                "position_offset": st.integers(-1000, 1000),
                "seed": st.integers(0, 99),
            }
        ),
        st.integers(1, 3),
        st.floats(0, 1),
    )
    def check(sizes, group, turning):
        rotary_dim = 2 * max(1, round(turning * sizes["D"] / 2))
        case = oracle.draw(Hq=group * sizes["Hkv"], rotary_dim=rotary_dim, **sizes)
        assert_within_budget(implementation, case)

    check()


@pytest.mark.parametrize("dtype", [f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)])
def test_positions_are_of_any_integers(dtype):
    """Also where a position and its offset sum to more than their dtype holds."""
    x = oracle.draw(S=3, D=8)

    def turned(positions, offset):
        return qk_norm_rope(x.q, x.k, x.v, positions=positions, position_offset=offset)[0]

    positions, offset = [100, 3, 7], [120, 2]
    expected = turned(np.array(positions, np.int32), np.array(offset, np.int32))
    with jax.enable_x64("64" in dtype):
        for of in (np.array, jnp.array):
            given = of(positions, dtype), of(offset, dtype)
            for got in (turned(*given), jax.jit(turned)(*given)):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


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
def test_lanes_that_do_not_turn_stay_as_they_are(implementation):
    case = oracle.draw(S=3, D=20, scales=False)
    q, k, _ = calls.IMPLEMENTATIONS[implementation](
        case.q, case.k, case.v, norm_eps=None, rotary_dim=6, position_offset=77
    )
    for x, got in ((case.q, q), (case.k, k)):
        np.testing.assert_array_equal(got[..., 6:], x.transpose(0, 2, 1, 3)[..., 6:])
        assert (got[..., :6] != x.transpose(0, 2, 1, 3)[..., :6]).all()


@pytest.mark.parametrize("implementation", calls.IMPLEMENTATIONS)
def test_an_interleaved_head_is_a_half_split_one_with_its_lanes_in_another_order(implementation):
    """In either convention scores are the same: the sums over lanes have other orders only."""
    case = oracle.draw(S=6, D=12, scales=False)
    step = calls.IMPLEMENTATIONS[implementation]
    order = np.arange(12).reshape(2, 6).T.ravel()  # 0, 6, 1, 7, …: neighbours are half-split pairs
    half_split = step(case.q, case.k, case.v)
    interleaved = step(case.q[..., order], case.k[..., order], case.v, rope_interleaved=True)
    for x, y in zip(half_split[:2], interleaved[:2], strict=True):
        np.testing.assert_allclose(x[..., order], y, rtol=1e-6, atol=1e-6)


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
    ({"q": None}, "q: got a NoneType; it must be a JAX or NumPy array. Convert it"),
    ({"q": Q.astype(float)}, "q: got dtype float64 (q has float64); q, k and v must share one of"),
    ({"q_scale": "x"}, "q_scale: got 'x', a str; it must be a JAX or NumPy array."),
    (
        {"q": Q.astype(np.int32)},
        "q: got dtype int32 (q has int32); q, k and v must share one of float",
    ),
    ({"v": V.astype(np.float16)}, "v: got dtype float16 (q has float32); q, k and v must share"),
    ({"k": K[:, :4], "v": V[:, :4]}, "q, k, v: got [B, S] of (2, 5), (2, 4) and (2, 4); they must"),
    ({"k": K[..., :6]}, "k: got head size 6; it must be q's, 8, for scores are their product."),
    (
        {"q": Q[..., :7], "k": K[..., :7]},
        "q, k: got head size D=7; it must be even, because RoPE turns pairs of lanes. Use an even "
        "head size.",
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
    ({"positions": np.ones(5, bool)}, "positions: got bool[5]; it must be integer [S=5]"),
    ({"positions": 3}, "positions: got int32[]; it must be integer [S=5] or [B=2, S=5], or None"),
    ({"q": Q > 0}, "q: got dtype bool (q has bool); q, k and v must share one of float32"),
    ({"positions": np.full(5, 2**31)}, "positions: got 2147483648; it must fit int32. Subtract"),
    ({"positions": jnp.full(5, 3e9, "uint32")}, "positions: got 3000000000; it must fit int32."),
    ({"positions": [[0], [1, 2]]}, "positions: got [[0], [1, 2]], a list; it must be a JAX or"),
    ({"position_offset": 1.0}, "position_offset: got 1.0; it must be an int32, a scalar or"),
    ({"position_offset": True}, "position_offset: got True; it must be an int32, a scalar or"),
    ({"position_offset": "3"}, "position_offset: got '3'; it must be an int32, a scalar or"),
    ({"position_offset": 2**40}, "position_offset: got 1099511627776; it must fit int32."),
    ({"position_offset": np.array([2**40, 0])}, "position_offset: got 1099511627776; it must fit"),
    (
        {"position_offset": np.arange(5)},
        "position_offset: got int64[5]; it must be an int32, a scalar or [B=2]. What differs by "
        "token goes into positions.",
    ),
    ({"rotary_dim": 3}, "rotary_dim: got 3; it must be even and from 2 to D=8, because RoPE turns"),
    ({"rotary_dim": 10}, "rotary_dim: got 10; it must be even and from 2 to D=8"),
    ({"rotary_dim": 0}, "rotary_dim: got 0; it must be even and from 2 to D=8"),
    (
        {"rotary_dim": 0.5},
        "rotary_dim: got 0.5; it must be a Python int, or None for all D=8 lanes. Of a fraction "
        "pass int(fraction * D).",
    ),
    ({"rope_interleaved": 1}, "rope_interleaved: got 1; it must be True, for pairs (2i, 2i + 1)"),
    ({"norm_eps": 0.0}, "norm_eps: got 0.0; it must be positive and finite in float32. Leave it"),
    ({"norm_eps": 1e-40}, "norm_eps: got 1e-40; it must be positive and finite in float32."),
    ({"rope_theta": 10**400}, "it must be positive and finite in float32. Leave it out"),
    ({"rope_theta": float("nan")}, "rope_theta: got nan; it must be positive and finite"),
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
    for value in (jnp.float32(1), True):
        with pytest.raises(
            TypeError, match=rf"{name}: got a \w+; it must be a Python float, fixed"
        ):
            qk_norm_rope(Q, K, V, **{name: value})


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
