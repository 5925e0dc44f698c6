"""The public functions: right for every prefix, window, sink and chunk; clear about the rest."""

import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smalti
from smalti.decode import RingBuffer, append, attend
from smalti.preprocess import qk_norm_rope

from .calls import IMPLEMENTATIONS, Case, check, compiled, decoded, ragged, step
from .oracle import Rules

GPT_J = {"rope_interleaved": True, "rotary_dim": 4, "rope_theta": 100.0}
CASES = {
    "token by token": (Rules(3, 5), {"T": 1, "chunks": 20}),
    "cache positions": (Rules(3, 5, "cache"), {"T": 1, "chunks": 20}),
    "absolute positions": (Rules(3, 5, "absolute"), {"T": 2, "chunks": 9}),
    "chunks": (Rules(2, 9, "cache"), {"T": 4, "chunks": 8}),
    "chunks longer than the window": (Rules(2, 3, "cache"), {"T": 8, "chunks": 4}),
    "nothing but the token itself": (Rules(0, 1), {"T": 3, "chunks": 4}),
    "sinks and the token itself": (Rules(3, 1, "cache"), {"T": 3, "chunks": 4}),
    "no sinks": (Rules(0, 6, "cache"), {"T": 3, "chunks": 6}),
    "shorter than the cache": (Rules(4, 60, "cache"), {"T": 3, "chunks": 4}),
    "shorter than the sinks": (Rules(20, 4, "cache"), {"T": 2, "chunks": 4}),
    "bfloat16": (Rules(3, 6, "cache"), {"T": 3, "chunks": 7, "dtype": "bfloat16"}),
    "interleaved, partial": (Rules(3, 6, "cache", **GPT_J), {"T": 3, "chunks": 7}),
    "odd sizes": (Rules(1, 7), {"T": 2, "chunks": 7, "Hq": 15, "Hkv": 3, "D": 5, "Dv": 1}),
    "whole lanes": (Rules(4, 13, "cache"), {"T": 5, "chunks": 5, "D": 128, "Dv": 128}),
    "keys with whole lanes": (Rules(4, 13), {"T": 2, "chunks": 9, "D": 128, "Dv": 40}),
    "capped": (Rules(2, 5, scale=0.7, softcap=1.5), {"T": 2, "chunks": 8}),
}


def case_of(rules, T: int, chunks: int, B: int = 3, seed: int = 0, **sizes) -> Case:
    return Case(rules, T, ragged(T, chunks, B, seed), seed=seed, **sizes)


# To interpret a kernel takes seconds.
SELDOM_PALLAS = ["reference", pytest.param("pallas", marks=pytest.mark.slow)]
QUICK = ("cache positions", "odd sizes", "whole lanes")
MOST = [("reference", name) for name in CASES] + [
    pytest.param("pallas", name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES
]


@pytest.mark.parametrize(("implementation", "name"), MOST)
def test_it_is_attention_over_what_is_retained(implementation, name):
    rules, sizes = CASES[name]
    check(case_of(rules, **sizes), implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_sizes_are_within_the_budget(implementation):
    rules = st.builds(
        Rules,
        sinks=st.integers(0, 5),
        window=st.integers(1, 14),
        positions=st.sampled_from([None, "cache", "absolute"]),
        softcap=st.sampled_from([None, 2.0]),
        rope_interleaved=st.booleans(),
    )

    @hypothesis.settings(
        max_examples=60 if implementation == "reference" else 20,
        deadline=None,
        derandomize=True,
        database=None,
    )
    @hypothesis.given(
        rules,
        st.fixed_dictionaries(
            {
                "T": st.integers(1, 20 if implementation == "reference" else 8),
                "chunks": st.integers(1, 7),
                "B": st.integers(1, 3),
                "Hkv": st.integers(1, 2),
                "D": st.integers(1, 6).map(lambda half: 2 * half),
                "Dv": st.integers(1, 12),
                "dtype": st.sampled_from(["float32", "bfloat16"]),
                "seed": st.integers(0, 99),
            }
        ),
        st.integers(1, 3),
    )
    def property_(rules, sizes, group):
        check(case_of(rules, Hq=group * sizes["Hkv"], **sizes), implementation)

    property_()


def test_float16():
    check(case_of(Rules(2, 5, "cache"), 3, 5, dtype="float16"), "reference")


@pytest.mark.parametrize("positions", ["cache", None])
def test_a_prompt_longer_than_a_piece(positions):
    """The XLA path takes long chunks apart, here into three; the last is cut."""
    rules = Rules(3, 150, positions)
    case = Case(rules, 300, np.array([[300, 171, 0], [1, 0, 90]]), Hq=2, Hkv=1, D=4, Dv=3)
    check(case, "reference")


@pytest.mark.parametrize("implementation", SELDOM_PALLAS)
@pytest.mark.parametrize("positions", ["cache", None])
def test_a_chunk_is_its_tokens_one_by_one(implementation, positions):
    """To the rounding of a sum in another order; and the caches are the same."""
    rules = Rules(2, 6, positions)
    whole = Case(rules, 8, np.full((4, 2), 8))
    single = Case(rules, 1, np.full((32, 2), 1))
    arrays = tuple(x.swapaxes(1, 2).reshape(32, 2, 1, *x.shape[3:]) for x in whole.chunks)
    single.__dict__["chunks"] = arrays
    (a, cache_a), (b, cache_b) = (decoded(x, implementation) for x in (whole, single))
    np.testing.assert_allclose(a.swapaxes(1, 2).reshape(b.shape), b, rtol=1e-5, atol=1e-6)
    for x, y in zip(jax.tree.leaves(cache_a), jax.tree.leaves(cache_b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_it_is_attention_under_the_streaming_mask(implementation, layout):
    """Of the same arrays, rotated beforehand."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 24, h, 16)), jnp.float32) for h in (4, 2, 2))
    q, k, v = jax.jit(lambda *x: qk_norm_rope(*x, norm_eps=None))(q, k, v)  # [B, H, S, D]
    mask = smalti.masks.streaming(sinks=3, window=7)
    expected = jax.jit(lambda *x: smalti.attention(*x, mask=mask, layout="BHSD"))(q, k, v)
    if layout == "BSHD":
        q, k, v, expected = (x.swapaxes(1, 2) for x in (q, k, v, expected))
    axis = layout.index("S")
    q, k, v = (jnp.stack(jnp.split(x, 4, axis=axis)) for x in (q, k, v))

    def body(cache, chunk):
        q, k, v = chunk
        options = {"layout": layout, **IMPLEMENTATIONS[implementation]}
        return attend(q, cache, k, v, **options)[::-1]

    cache = RingBuffer.empty(2, 2, 16, sinks=3, window=7, dtype=q.dtype)
    _, outs = compiled(lambda *x: jax.lax.scan(body, *x))(cache, (q, k, v))
    out = jnp.concatenate(list(outs), axis=axis)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)


def test_a_window_that_is_never_full_is_a_plain_cache():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(12, 1, 1, 2, 8)), jnp.float32) for _ in range(3))
    cache = RingBuffer.empty(1, 2, 8, window=12, dtype=q.dtype)
    _, outs = jax.lax.scan(lambda cache, x: attend(x[0], cache, *x[1:])[::-1], cache, (q, k, v))
    whole = (x.reshape(1, 12, 2, 8) for x in (q, k, v))
    expected = smalti.attention(*whole, mask=smalti.masks.causal(), implementation="reference")
    np.testing.assert_allclose(outs.reshape(1, 12, 2, 8), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_a_prompt_may_be_attended_to_elsewhere(layout):
    """`append` leaves the cache as `attend` does."""
    case = Case(Rules(2, 5), 9, np.array([[9, 4]]))
    _, expected = decoded(case, "reference")
    _, k, v = (x[0] if layout == "BSHD" else x[0].swapaxes(1, 2) for x in case.chunks)
    cache = append(case.empty(), k, v, lengths=case.lengths[0], layout=layout)
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_200_steps_of_a_scan_are_the_calls_one_by_one(implementation):
    case = Case(Rules(2, 11, "cache"), 1, ragged(1, 200, 2), Hq=2, Hkv=1)
    chunks = *(jnp.asarray(x) for x in case.chunks), jnp.asarray(case.lengths, jnp.int32)
    scan = functools.partial(jax.lax.scan, step(case, implementation))
    last, scanned = compiled(scan)(case.empty(), chunks)
    outs, cache = decoded(case, implementation)
    np.testing.assert_array_equal(scanned, outs)
    for x, y in zip(jax.tree.leaves(last), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", SELDOM_PALLAS)
def test_vmap_is_call_by_call(implementation):
    cases = [Case(Rules(2, 5, "cache"), 2, ragged(2, 3, 2, seed), seed=seed) for seed in (1, 2)]
    mapped = compiled(jax.vmap(step(cases[0], implementation)))
    cache = jax.tree.map(lambda *xs: jnp.stack(xs), *(case.empty() for case in cases))
    outs = []
    for i in range(3):
        chunk = (np.stack([case.chunks[n][i] for case in cases]) for n in range(3))
        cache, out = mapped(cache, (*chunk, np.stack([case.lengths[i] for case in cases])))
        outs.append(out)
    for n, case in enumerate(cases):
        expected, last = decoded(case, implementation)
        np.testing.assert_allclose(np.stack(outs)[:, n], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(cache.k[n], last.k, rtol=1e-6, atol=1e-6)


def test_a_donated_cache_gives_its_memory():
    case = case_of(Rules(2, 500), 1, 1, Hkv=4)
    lower = jax.jit(step(case, "reference"), donate_argnums=0).lower
    chunk = *(x[0] for x in case.chunks), case.lengths[0]
    cache = sum(x.nbytes for x in jax.tree.leaves(case.empty()))
    assert lower(case.empty(), chunk).compile().memory_analysis().alias_size_in_bytes == cache


@pytest.mark.parametrize("implementation", SELDOM_PALLAS)
def test_two_runs_are_bitwise_equal(implementation):
    case = case_of(Rules(2, 5, "cache"), 1, 12)
    np.testing.assert_array_equal(*(decoded(case, implementation)[0] for _ in range(2)))


def test_none_picks_by_the_platform_of_the_mesh_in_context():
    def names(T: int, dtype: str) -> str:
        case = Case(Rules(2, 5), T, np.full((1, 2), T), dtype=dtype)
        function = lambda cache, q, k, v: attend(q, cache, k, v)  # noqa: E731
        return str(jax.make_jaxpr(function)(case.empty(), *(x[0] for x in case.chunks)))

    assert "pallas_call" not in names(1, "float32")
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, platform="tpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert "smalti_decode" in names(8, "float32")
        assert "pallas_call" not in names(9, "float32")
        assert "pallas_call" not in names(1, "float16")


def test_nothing_is_promoted_implicitly():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for implementation in IMPLEMENTATIONS:
            case = case_of(Rules(2, 5, "cache", softcap=3.0), 1, 2, dtype="bfloat16")
            decoded(case, implementation)


def test_64_bits():
    with jax.enable_x64(True):
        for implementation in IMPLEMENTATIONS:
            case = case_of(Rules(2, 5, "cache"), 1, 4)
            assert check(case, implementation).dtype == np.float32


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
Q, K, V = (np.zeros((2, 3, heads, 8), np.float32) for heads in (4, 2, 2))
CACHE = RingBuffer.empty(2, 2, 8, sinks=1, window=4, dtype="float32")
REFUSED = [
    ({"cache": 1}, "cache: got a int; it must be a smalti.decode.RingBuffer. Make one with"),
    (
        {"cache": dataclasses.replace(CACHE, v=CACHE.v[:, :, :5])},
        "cache.v: got float32[2, 2, 5, 8]; it must be float32 [B=2, Hkv=2, 128, D], by cache.k",
    ),
    (
        {"cache": dataclasses.replace(CACHE, v=CACHE.v[:1])},
        "cache.v: got float32[1, 2, 128, 8]; it must be float32 [B=2, Hkv=2, 128, D], by cache.k",
    ),
    (
        {"cache": dataclasses.replace(CACHE, v=CACHE.v.astype("float16"))},
        "cache.v: got float16[2, 2, 128, 8]; it must be float32 [B=2, Hkv=2, 128, D], by cache.k",
    ),
    (
        {"cache": dataclasses.replace(CACHE, window=200)},
        "cache.k: got float32[2, 2, 128, 8]; it must be float32 [B=2, Hkv=2, 256, D], by cache.k",
    ),
    (
        {"cache": dataclasses.replace(CACHE, k=CACHE.k[0])},
        "cache.k: got float32[2, 128, 8]; it must be float32, bfloat16 or float16 of four dimens",
    ),
    (
        {"cache": dataclasses.replace(CACHE, v=CACHE.v.astype(int))},
        "cache.v: got int32[2, 2, 128, 8]; it must be float32, bfloat16 or float16 of four dimens",
    ),
    (
        {"cache": dataclasses.replace(CACHE, k=None)},
        "cache.k: got a NoneType; it must be a JAX or NumPy array. Make a cache with RingBuffer.",
    ),
    ({"cache": dataclasses.replace(CACHE, length=3)}, "cache.length: got a int; it must be a JAX"),
    (
        {"cache": dataclasses.replace(CACHE, length=jnp.zeros(3, int))},
        "cache.length: got int32[3]; it must be int32 [B=2], how many tokens each sequence has",
    ),
    (
        {"cache": dataclasses.replace(CACHE, length=jnp.int32(0))},
        "cache.length: got int32[]; it must be int32 [B=2], how many tokens each sequence has had",
    ),
    (
        {"cache": dataclasses.replace(CACHE, length=jnp.zeros(2))},
        "cache.length: got float32[2]; it must be int32 [B=2], how many tokens each sequence has",
    ),
    (
        {"cache": dataclasses.replace(CACHE, length=jnp.zeros(2, "uint8"))},
        "cache.length: got uint8[2]; it must be int32 [B=2], how many tokens each sequence has",
    ),
    (
        {"cache": dataclasses.replace(CACHE, window=0)},
        "cache.window: got 0; it must be a Python int of at least 1. Make a cache with",
    ),
    (
        {"cache": dataclasses.replace(CACHE, sinks="1")},
        "cache.sinks: got '1'; it must be a Python int of at least 0. Make a cache with",
    ),
    ({"q": [1]}, "q: got a list; it must be a JAX or NumPy array. Convert it with jnp.asarray."),
    ({"k": K[:, 0]}, "k: got shape [2, 2, 8] with layout='BSHD'; it must be [B, T, H, D] without"),
    ({"q": Q[:, :0]}, "q: got shape [2, 0, 4, 8] with layout='BSHD'; it must be [B, T, H, D]"),
    ({"v": V.astype(np.float16)}, "v: got dtype float16; it must be the cache's, float32, one of"),
    ({"k": K[:, :, :1]}, "k: got B=2, Hkv=1, D=8; the cache has B=2, Hkv=2, D=8. If heads"),
    ({"v": V[..., :4]}, "v: got B=2, Hkv=2, D=4; the cache has B=2, Hkv=2, D=8."),
    ({"v": V[:, :2]}, "v: got 2 tokens; it must have as many as k, 3. Pass keys and values of"),
    ({"q": Q[:, :2]}, "q: got B=2, T=2, D=8; they must be k's, B=2, T=3, D=8: a query for each"),
    ({"q": Q[:, :, :3]}, "q: got 3 heads over 2 heads of k and v; the former must be a multiple"),
    ({"layout": "BSDH"}, "layout: got 'BSDH'; allowed are 'BSHD', 'BHSD'. Did you mean"),
    ({"lengths": 2}, "lengths: got 2; it must be an integer array [B=2], how many of the T=3"),
    ({"lengths": np.ones(2)}, "lengths: got float64[2]; it must be an integer array [B=2]"),
    ({"lengths": np.ones(3, int)}, "lengths: got int64[3]; it must be an integer array [B=2]"),
    ({"lengths": np.array([4, 1])}, "lengths: got values from 1 to 4; they must be from 0 to T=3"),
    ({"lengths": np.array([0, -1])}, "lengths: got values from -1 to 0; they must be from 0 to"),
    ({"positions": "slot"}, "positions: got 'slot'; allowed are 'cache', 'absolute'."),
    ({"rope_theta": 1e4}, "rope_theta: got 10000.0 with positions=None, which rotates nothing."),
    ({"rotary_dim": 4}, "rotary_dim: got 4 with positions=None, which rotates nothing. Pass"),
    ({"rope_interleaved": True}, "rope_interleaved: got True with positions=None, which rotates"),
    ({"positions": "cache", "rotary_dim": 3}, "rotary_dim: got 3; it must be even and from 2 to"),
    ({"positions": "cache", "rope_theta": 0.0}, "rope_theta: got 0.0; it must be positive and"),
    ({"scale": float("inf")}, "scale: got inf; it must be finite in float32. Leave it out for"),
    ({"softcap": 0.0}, "softcap: got 0.0; it must be positive and finite in float32. Leave it"),
    ({"implementation": "xla"}, "implementation: got 'xla'; allowed are 'reference', 'pallas'."),
    ({"interpret": True}, "interpret: got True with implementation=None; only Pallas kernels can"),
    ({"implementation": "pallas", "interpret": 1}, "interpret: got 1; it must be True, False,"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m.split(";")[0] for _, m in REFUSED])
def test_wrong_arguments_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(**({"q": Q, "cache": CACHE, "k": K, "v": V} | changes))


@pytest.mark.parametrize("field", ["k", "v", "length"])
def test_append_checks_the_cache_too(field):
    cache = dataclasses.replace(CACHE, **{field: getattr(CACHE, field)[:1].astype("float16")})
    with pytest.raises(ValueError, match=rf"^cache\.{field}: got |^cache\.v: got .* by cache\.k"):
        append(cache, K, V)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_lengths_may_be_of_any_integers(dtype):
    """Also where T is more than the dtype holds, and where a traced one is more than T."""
    cache, T = RingBuffer.empty(2, 1, 2, window=400, dtype="float32"), 300
    x = jnp.ones((2, T, 1, 2))
    with jax.enable_x64("64" in dtype):
        most = np.iinfo(dtype).max
        for lengths in (np.array([100, 0], dtype), jnp.array([100, 0], dtype)):
            for run in (append, jax.jit(append)):
                got = run(cache, x, x, lengths=lengths).length
                assert got.dtype == jnp.int32
                np.testing.assert_array_equal(got, [100, 0])
        written = jax.jit(append)(cache, x, x, lengths=jnp.array([most, 7], dtype)).length
        np.testing.assert_array_equal(written, [min(most, T), 7])
    padded = attend(x, cache, x, x, lengths=np.array([100, 0], dtype))[0]
    assert (padded[0, 100:] == 0).all()
    np.testing.assert_allclose(padded[0, :100], 1, rtol=1e-5)


def test_an_odd_head_is_not_rotated():
    cache = RingBuffer.empty(2, 2, 7, window=4, dtype="float32")
    with pytest.raises(ValueError, match=r"D=7 with positions='cache'; it must be even, because"):
        attend(Q[..., :7], cache, K[..., :7], V[..., :7], positions="cache")


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_constants_are_python_floats(name):
    for value in (jnp.float32(1), True, "1"):
        with pytest.raises(TypeError, match=rf"{name}: got a \w+; it must be a Python float, fix"):
            attend(Q, CACHE, K, V, **{name: value})


def test_pallas_never_falls_back():
    def message(**changes) -> str:
        arguments = {"q": Q, "cache": CACHE, "k": K, "v": V, "implementation": "pallas"}
        with pytest.raises(NotImplementedError) as caught:
            attend(**(arguments | changes))
        return str(caught.value)

    assert "its kernel is for TPUs, and this is a cpu. Pass interpret=True" in message()
    many = {
        name: np.zeros((2, 9, *x.shape[2:]), x.dtype)
        for name, x in zip("qkv", (Q, K, V), strict=True)
    }
    assert "got 9 new tokens; its kernel takes up to 8." in message(**many, interpret=True)
    half = {name: x.astype(np.float16) for name, x in zip("qkv", (Q, K, V), strict=True)}
    cache = dataclasses.replace(CACHE, k=CACHE.k.astype("float16"), v=CACHE.v.astype("float16"))
    assert "got dtype float16; its kernel takes float32" in message(**half, cache=cache)
