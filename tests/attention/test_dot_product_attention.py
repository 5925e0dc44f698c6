"""`smalti.dot_product_attention` is `jax.nn.dot_product_attention`, but for rows that see nothing.

Both are compared with the same thing in float64. Ours may be as wrong as JAX's, twice over.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import smalti

B, N, K, H = 2, 4, 2, 8
LENGTHS = [(7, 7), (5, 9), (9, 5)]  # (T, S)
EPSILON = float(np.finfo(np.float32).eps)


def arrays(T, S, seed=0, dtype=np.float32):
    rng = np.random.default_rng([T, S, seed])
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def visible_pairs(
    T, S, *, mask=None, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None,
    local_window_size=None,
):  # fmt: skip
    """bool [B, N, T, S], by the documentation of `jax.nn.dot_product_attention`."""
    i, j = np.arange(T)[:, None], np.arange(S)[None, :]
    visible = np.ones((B, N, T, S), bool)
    if mask is not None:
        visible &= np.asarray(mask)
    if is_causal:
        visible &= j <= i
    if local_window_size is not None:
        size = local_window_size
        left, right = (size, size) if isinstance(size, int) else size
        visible &= (i - left <= j) & (j <= i + right)
    if query_seq_lengths is not None:
        visible &= i < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        visible &= j < np.asarray(key_value_seq_lengths)[:, None, None, None]
    return visible


def in_float64(query, key, value, dout, *, bias=None, scale=None, visible):
    """Output and gradients of sum(output · dout), rows without a visible key 0; the sizes of what
    was summed for each; the residual [B, T, N]."""
    query, key, value, dout = (np.asarray(x, np.float64) for x in (query, key, value, dout))
    scale = 1 / np.sqrt(H) if scale is None else float(scale)
    wide_key, wide_value = (x.repeat(N // K, axis=2) for x in (key, value))
    products = np.einsum("btnh,bsnh->bnts", query, wide_key)
    logits = products * scale + (0 if bias is None else np.asarray(bias, np.float64))
    empty = ~visible.any(-1, keepdims=True)
    logits = np.where(visible, logits, -np.inf)
    top = np.where(empty, 0, logits.max(-1, keepdims=True))
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0].swapaxes(1, 2)
    weights = weights / np.where(empty, 1, total)
    dweights = np.einsum("btnh,bsnh->bnts", dout, wide_value)
    dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))

    def sums(weights, dlogits, products, query, key, value, dout):
        groups = (B, -1, K, N // K, H)
        found = {
            "output": np.einsum("bnts,bsnh->btnh", weights, value),
            "query": scale * np.einsum("bnts,bsnh->btnh", dlogits, key),
            "key": scale * np.einsum("bnts,btnh->bsnh", dlogits, query).reshape(groups).sum(3),
            "value": np.einsum("bnts,btnh->bsnh", weights, dout).reshape(groups).sum(3),
            "scale": np.sum(dlogits * products),
        }
        if bias is not None:
            axes = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1)
            found["bias"] = dlogits.sum(axes, keepdims=True)
        return found

    terms = (products, query, wide_key, wide_value, dout)
    found = sums(weights, dlogits, *terms)
    # The same sums of absolute values: what float32 rounds before terms cancel (the gradient of a
    # bias that all keys share is 0, but never computed as 0).
    wide = weights * (np.abs(dweights) + (weights * np.abs(dweights)).sum(-1, keepdims=True))
    sizes = sums(weights, wide, *map(np.abs, terms))
    return found, sizes, lse


@functools.partial(jax.jit, static_argnums=0, static_argnames=("is_causal", "local_window_size"))
def run(function, differentiable, fixed, dout, is_causal=False, local_window_size=None):
    """Output, residual and gradients; arrays by name."""

    def call(differentiable):
        out, residual = function(
            **differentiable,
            **fixed,
            is_causal=is_causal,
            local_window_size=local_window_size,
            return_residual=True,
        )
        # Were there a gradient through the residual, it would be far from small.
        loss = jnp.sum(out * dout) + 100 * jnp.sum(jnp.where(residual > -1e9, residual, 0))
        return loss, (out, residual)

    gradients, (out, residual) = jax.grad(call, has_aux=True)(differentiable)
    return {"output": out, **gradients}, residual


def assert_as_jax(differentiable, dout, *, options=None, **fixed):
    """Compare in all rows that see a key. JAX gives the others the mean of the values, so they get
    no cotangent; that ours are 0 is asserted."""
    options = options or {}
    T, S = differentiable["query"].shape[1], differentiable["key"].shape[1]
    visible = visible_pairs(T, S, **fixed, **options)
    seeing = visible.any(-1).swapaxes(1, 2)  # [B, T, N]
    dout = np.where(seeing[..., None], dout, 0).astype(np.float32)
    exact, sizes, lse = in_float64(**differentiable, dout=dout, visible=visible)
    given = {name: jnp.asarray(x) for name, x in differentiable.items()}
    fixed = {name: jnp.asarray(x) for name, x in fixed.items()}
    ours, our_residual = run(smalti.dot_product_attention, given, fixed, dout, **options)
    jaxs, jax_residual = run(jax.nn.dot_product_attention, given, fixed, dout, **options)

    for name in ours:
        assert ours[name].shape == jaxs[name].shape, name
        assert ours[name].dtype == jaxs[name].dtype, name
        rows = seeing if name == "output" else np.ones(exact[name].shape, bool)
        # A few roundings, which JAX may be lucky enough not to make.
        tiny = 4 * EPSILON * sizes[name].max()
        error, their_error = (
            np.abs(np.asarray(x[name], np.float64) - exact[name])[rows].max(initial=0)
            for x in (ours, jaxs)
        )
        assert error <= 2 * their_error + tiny, (name, error, their_error, tiny)
    assert not np.asarray(ours["output"])[~seeing].any()

    assert our_residual.shape == jax_residual.shape
    assert our_residual.dtype == jax_residual.dtype
    assert (np.asarray(our_residual)[~seeing] == -np.inf).all()
    error, their_error = (
        np.abs(np.asarray(x, np.float64)[seeing] - lse[seeing]).max(initial=0)
        for x in (our_residual, jax_residual)
    )
    assert error <= 2 * their_error + 4 * EPSILON * np.abs(lse[seeing]).max(initial=1)


PARTS = ["bhts", "ts", "hts", "bs", "h", "bt"]  # of [B, N, T, S]; the others are 1
CALLS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 999),
        "bias": st.sampled_from([None, *PARTS]),
        "mask": st.sampled_from([None, *PARTS]),
        "scale": st.booleans(),
        "query_seq_lengths": st.booleans(),
        "key_value_seq_lengths": st.booleans(),
        "is_causal": st.booleans(),
        "local_window_size": st.sampled_from([None, 2, (3, 0), (0, 1), (100, 1)]),
    }
)


def make(call, T, S):
    """Differentiable and other arrays of a drawn call, and the cotangent."""
    rng = np.random.default_rng(call["seed"])
    part = lambda dims: [  # noqa: E731
        n if d in dims else 1 for d, n in zip("bhts", (B, N, T, S), strict=True)
    ]
    differentiable, fixed = arrays(T, S, call["seed"]), {}
    if call["bias"]:
        differentiable["bias"] = rng.normal(size=part(call["bias"])).astype(np.float32)
    if call["scale"]:
        differentiable["scale"] = np.float32(rng.uniform(0.1, 2))
    if call["mask"]:
        fixed["mask"] = rng.random(part(call["mask"])) < 0.7
    for name, length in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if call[name]:
            fixed[name] = rng.integers(0, length + 2, B).astype(np.int32)
    return differentiable, fixed, rng.normal(size=(B, T, N, H)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_random_arguments_with_gradients(T, S):
    # Each example compiles both functions; shrinking a failure would compile hundreds.
    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(CALLS)
    def check(call):
        differentiable, fixed, dout = make(call, T, S)
        options = {name: call[name] for name in ("is_causal", "local_window_size")}
        assert_as_jax(differentiable, dout, options=options, **fixed)

    check()


def test_causal_is_aligned_at_the_first_query_and_key():
    for T, S in ((5, 9), (9, 5)):
        given = arrays(T, S)
        dout = np.ones((B, T, N, H), np.float32)
        assert_as_jax(given, dout, options={"is_causal": True})
        out = smalti.dot_product_attention(**given, is_causal=True)
        first = given["value"][:, 0].repeat(N // K, axis=1)
        np.testing.assert_array_equal(out[:, 0], first)  # the first query sees the first key only


def test_a_row_without_a_visible_key_is_zero_and_so_are_its_gradients():
    given = arrays(7, 7)
    mask = np.ones((1, 1, 7, 7), bool)
    mask[..., 3, :] = False

    def loss(query):
        rest = {name: given[name] for name in ("key", "value")}
        out, _ = smalti.dot_product_attention(query, **rest, mask=mask, return_residual=True)
        return jnp.sum(out), out

    gradient, out = jax.grad(loss, has_aux=True)(jnp.asarray(given["query"]))
    assert not out[:, 3].any()
    assert not gradient[:, 3].any()
    assert gradient[:, 2].any()


def test_three_dimensions_are_one_batch_entry():
    given = {name: x[0] for name, x in arrays(5, 9).items()}
    bias = np.random.default_rng(0).normal(size=(N, 5, 9)).astype(np.float32)
    call = {**given, "bias": bias, "mask": bias < 1, "return_residual": True}
    out, residual = smalti.dot_product_attention(**call)
    expected, expected_residual = jax.nn.dot_product_attention(**call)
    assert out.shape == expected.shape == (5, N, H)
    assert residual.shape == expected_residual.shape == (5, N)
    # Both are weighted means of 9 values: each rounds a sum of 9 terms and of 8 products.
    np.testing.assert_allclose(out, expected, rtol=0, atol=32 * EPSILON)
    np.testing.assert_allclose(residual, expected_residual, rtol=0, atol=32 * EPSILON)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_has_jaxs_dtypes_and_no_greater_error(dtype):
    given = {name: jnp.asarray(x).astype(dtype) for name, x in arrays(7, 7).items()}
    out, residual = smalti.dot_product_attention(**given, return_residual=True)
    theirs, their_residual = jax.nn.dot_product_attention(**given, return_residual=True)
    assert out.dtype == theirs.dtype == dtype
    assert residual.dtype == their_residual.dtype == dtype
    exact, _, lse = in_float64(
        **given, dout=np.zeros((B, 7, N, H)), visible=np.ones((B, N, 7, 7), bool)
    )
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    for found, peer, expected in (
        (out, theirs, exact["output"]),
        (residual, their_residual, lse),
    ):
        error, their_error = (
            np.abs(np.asarray(x, np.float64) - expected).max() for x in (found, peer)
        )
        assert error <= 2 * their_error + half_ulp * np.abs(expected).max()


@pytest.mark.parametrize("implementation", ["xla", "reference", "blockwise"])
def test_a_named_implementation_computes_the_same(implementation):
    given = arrays(7, 7)
    found = smalti.dot_product_attention(**given, is_causal=True, implementation=implementation)
    expected = jax.nn.dot_product_attention(**given, is_causal=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=32 * EPSILON)


def test_a_bias_of_integers_is_added_as_jax_adds_it():
    given = arrays(7, 7)
    bias = np.arange(7, dtype=np.int32).reshape(1, 1, 1, 7)
    found = smalti.dot_product_attention(**given, bias=bias)
    expected = jax.nn.dot_product_attention(**given, bias=bias)
    # The rounding of logits of up to 16 moves a weight by as much, and the values are below 4.
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * EPSILON * 4)


def test_the_signature_is_jaxs():
    ours = inspect.signature(smalti.dot_product_attention).parameters.values()
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters.values()
    describe = lambda parameters: [(p.name, p.kind, p.default) for p in parameters]  # noqa: E731
    assert describe(ours) == describe(theirs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"value": np.zeros((B, 7, K, 3), np.float32)},
            "value: got shape [2, 7, 2, 3]; it must be key's, [2, 7, 2, 8]. For values of another "
            "head size use smalti.attention.",
        ),
        (
            {"mask": np.zeros((1, 1, 7, 7), np.float32)},
            "mask: got dtype float32; it must be boolean.",
        ),
        ({"mask": np.zeros((1, 1, 7, 6), bool)}, "does not fit [B, Hq, Sq, Sk] = [2, 4, 7, 7]"),
        (
            {"bias": np.zeros((1, 3, 7, 7), np.float32)},
            "bias: got shape [1, 3, 7, 7]; it must broadcast to [B, Hq, Sq, Sk] = [2, 4, 7, 7].",
        ),
        (
            {"query_seq_lengths": np.zeros(3, np.int32)},
            "query_seq_lengths: got int32[3]; it must be int32 of shape [2].",
        ),
        (
            {"key_value_seq_lengths": np.zeros(2, np.float32)},
            "key_value_seq_lengths: got float32[2]; it must be int32 of shape [2].",
        ),
        (
            {"implementation": "blockwse"},
            "implementation: got 'blockwse'; allowed are 'xla', 'reference', 'blockwise', "
            "'pallas', 'cudnn'. Did you mean 'blockwise'?",
        ),
        ({"query": np.zeros((1, B, 7, N, H), np.float32)}, "at most four dimensions."),
        ({"query": np.zeros((B, 7, 3, H), np.float32)}, "must be a multiple of the key heads"),
    ],
)
def test_a_wrong_argument_is_named(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        smalti.dot_product_attention(**{**arrays(7, 7), **change})


def test_cudnn_is_refused():
    with pytest.raises(
        NotImplementedError,
        match=re.escape(
            "implementation='cudnn': smalti has no cuDNN path. Leave it out, or call "
            "jax.nn.dot_product_attention."
        ),
    ):
        smalti.dot_product_attention(**arrays(7, 7), implementation="cudnn")
