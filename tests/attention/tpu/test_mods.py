"""Functions of the user in kernels: what is left for them to compute says the same as the function,
and what they read is no larger than what it depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti import masks
from smalti.attention.tpu import mods
from smalti.attention.tpu.mods import find_band, split, traced_mask
from smalti.masks.mask_mod import as_mask
from smalti.masks.traced_mod import trace_mod
from tests.attention.tpu.walks import visible_pairs

B, H, SQ, SK = SIZES = 2, 3, 11, 14


def evaluated(kernel_mod, arrays, scores=None, heads: int = H) -> np.ndarray:
    """``[B, Hq, Sq, Sk]``, a head at a time, as kernels do it."""
    q, k = np.arange(SQ, dtype=np.int32), np.arange(SK, dtype=np.int32)
    found = np.zeros((B, heads, SQ, SK), bool if scores is None else np.float32)
    for b, h in np.ndindex(B, heads):
        loaded = []
        for operand, x in zip(kernel_mod.operands, arrays, strict=True):
            x = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
            loaded.append(
                {
                    "number": lambda x: x[0, 0],
                    "q": lambda x: x.T,
                    "kv": lambda x: x.T,
                    "relative": lambda x: x[0][q[None, :] - k[:, None] + SK - 1],
                    "scores": lambda x: x.T,
                }[operand.kind](x)
            )
        arguments = [] if scores is None else [jnp.asarray(scores[b, h].T)]
        tile = kernel_mod(loaded, *arguments, jnp.int32(b), jnp.int32(h), q[None, :], k[:, None])
        found[b, h] = np.broadcast_to(tile, (SK, SQ)).T
    return found


def shapes_fit(kernel_mod, arrays) -> None:
    lengths = {
        "number": (1, 1),
        "q": (SQ, 1),
        "kv": (1, SK),
        "relative": (1, SK - 1 + SQ),
        "scores": (SQ, SK),
    }
    for operand, x in zip(kernel_mod.operands, arrays, strict=True):
        assert x.shape[0] in (1, B)
        assert x.shape[1] in (1, H)
        assert x.shape[2:] == lengths[operand.kind]
        dtype = jnp.float32 if operand.floating else jnp.int32
        assert x.dtype == (jnp.bfloat16 if operand.kind == "scores" else dtype)


def leaves():
    number = st.integers(-6, 18)
    offset = st.none() | number | st.lists(number, min_size=B, max_size=B).map(np.array)
    size = st.integers(0, 9)
    length = number | st.lists(number, min_size=B, max_size=B).map(np.array)

    def ids(seed, batch):
        rng = np.random.default_rng(seed)
        return tuple(rng.integers(-1, 3, (batch, n)).astype(np.int32) for n in (SQ, SK))

    return st.one_of(
        st.just(masks.full()),
        st.builds(masks.causal, offset),
        st.builds(masks.sliding_window, st.integers(1, 9), offset),
        st.builds(masks.local, size, size, offset=number),
        st.builds(masks.streaming, sinks=size, window=st.integers(1, 9), offset=offset),
        st.builds(masks.prefix_lm, length, offset),
        st.builds(masks.lengths, q=st.none() | length, kv=length),
        st.builds(ids, st.integers(0, 99), st.sampled_from([1, B])).map(masks.document),
    )


COMBINED = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        inner.map(lambda a: ~a),
    ),
    max_leaves=4,
)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(mask=COMBINED)
def test_masks_of_the_catalogue(mask):
    sizes = B, 1, SQ, SK
    mask = mask.bind(*sizes)
    expected = visible_pairs(mask, sizes)
    kernel_mod, arrays = split(traced_mask(mask), sizes, "mask")
    shapes_fit(kernel_mod, arrays)
    assert {x.kind for x in kernel_mod.operands} <= {"number", "q", "kv"}
    np.testing.assert_array_equal(evaluated(kernel_mod, arrays, heads=1), expected)
    band = find_band(mask, sizes)
    if band is not None:
        np.testing.assert_array_equal(np.broadcast_to(within(band), expected.shape), expected)


def within(band) -> np.ndarray:
    low, high = band
    difference = np.arange(SK)[None, :] - np.arange(SQ)[:, None]
    visible = np.ones((SQ, SK), bool)
    visible &= True if low is None else difference >= low
    visible &= True if high is None else difference <= high
    return visible


rng = np.random.default_rng(0)
Q_IDS = jnp.asarray(rng.integers(0, 3, (B, SQ)), jnp.int32)
KV_IDS = jnp.asarray(rng.integers(0, 3, (B, SK)), jnp.int32)
WEIGHTS = jnp.asarray(rng.normal(size=H), jnp.float32)
BY_KEY = jnp.asarray(rng.normal(size=(B, SK)), jnp.float32)
BY_QUERY = jnp.asarray(rng.normal(size=(H, SQ)), jnp.float32)
RELATIVE = jnp.asarray(rng.normal(size=(H, SQ + SK)), jnp.float32)
BUCKETS = jnp.asarray(rng.normal(size=(H, 4)), jnp.float32)
STARTS = jnp.asarray([2, 5], jnp.int32)
WHOLE = jnp.asarray(rng.random((SQ, SK)) < 0.5)
SCALAR = jnp.float32(1.7)
TABLE = jnp.asarray(rng.normal(size=(SQ, SK)), jnp.float32)

# Each: the function, and the kinds of the operands that it has in a kernel.
MASK_MODS = {
    "documents": (lambda b, h, q, k: Q_IDS[b, q] == KV_IDS[b, k], ["q", "kv"]),
    "starts": (lambda b, h, q, k: (k >= STARTS[b]) & (k <= q), ["number"]),
    "per head": (lambda b, h, q, k: (q - k < 3 * h + 1) & (k <= q), ["number"]),
    "dilated": (lambda b, h, q, k: (q - k) % 3 == 0, ["relative"]),
    "dilated, of its own": (
        lambda b, h, q, k: (k - q) % (h + 1) == 0,
        ["relative", "number", "number"],
    ),
    "blocks": (lambda b, h, q, k: q // 4 == k // 4, ["q", "kv"]),
    "remainders": (lambda b, h, q, k: (q + 2 * k + h) % 3 == b, []),
    "relative table": (lambda b, h, q, k: RELATIVE[h, q - k + SK - 1] > 0, ["relative"]),
    "by key": (lambda b, h, q, k: BY_KEY[b, k] > 0, ["kv"]),
    "by query, nested": (jax.jit(lambda b, h, q, k: (BY_QUERY[h, q] > 0) | (k == q)), ["q"]),
    "whole": (lambda b, h, q, k: WHOLE[q, k] & (k <= q), ["scores"]),
    "all": (lambda b, h, q, k: jnp.bool_(True), []),
    "of the head alone": (lambda b, h, q, k: h != 1, ["number"]),
    "constant table": (lambda b, h, q, k: k <= q + jnp.arange(5)[3], []),
}


@jax.custom_jvp
def doubled(x):
    return 2 * x


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), 2 * tangents[0]


def bucket(distance):
    """As T5's: near ones by themselves, far ones together."""
    distance = jnp.maximum(distance, 0)
    return jnp.where(distance < 2, distance, jnp.minimum(2 + distance // 5, 3))


SCORE_MODS = {
    "as it is": (lambda s, b, h, q, k: s, []),
    "alibi": (lambda s, b, h, q, k: s - WEIGHTS[h] * (q - k), ["number"]),
    "a constant": (lambda s, b, h, q, k: jnp.float32(0), []),
    "a scalar": (lambda s, b, h, q, k: s * SCALAR, ["number"]),
    "by key": (lambda s, b, h, q, k: s + BY_KEY[b, k], ["kv"]),
    "by query and key": (
        lambda s, b, h, q, k: s * BY_QUERY[h, q] + jnp.exp(BY_KEY[b, k]),
        ["q", "kv"],
    ),
    "relative": (lambda s, b, h, q, k: s + RELATIVE[h, q - k + SK - 1], ["relative"]),
    "relative, the other way": (lambda s, b, h, q, k: s + RELATIVE[h, k - q + SQ], ["relative"]),
    "buckets": (lambda s, b, h, q, k: s + BUCKETS[h, bucket(q - k)], ["relative"]),
    "nested": (
        lambda s, b, h, q, k: jnp.where(k <= q, jax.nn.relu(s) + WEIGHTS[h], -jnp.inf),
        ["number"],
    ),
    "gelu": (lambda s, b, h, q, k: jax.nn.gelu(s) * jax.jit(jnp.sin)(BY_KEY[b, k]), ["kv"]),
    "custom_jvp": (lambda s, b, h, q, k: doubled(s) + doubled(WEIGHTS[h]), ["number"]),
    "integers captured": (
        lambda s, b, h, q, k: jnp.where(Q_IDS[b, q] == KV_IDS[b, k], s, s - 1),
        ["q", "kv"],
    ),
    "remainders": (lambda s, b, h, q, k: s + ((q + 2 * k + h) % 3 == b), []),
    "its own cap": (lambda s, b, h, q, k: 3 * jnp.tanh(s / 3), []),
}


def traced_score_mod(function):
    index = jax.ShapeDtypeStruct((), jnp.int32)
    avals = jax.ShapeDtypeStruct((), jnp.float32), *(index,) * 4
    return trace_mod(function, avals, name="score_mod", result=float)


def every_pair(function, *first):
    """A function of scalars over all of ``first`` and indices, by `jax.vmap`."""
    indices = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in SIZES), indexing="ij")
    flat = [jnp.asarray(x).reshape(-1) for x in (*first, *indices)]
    return np.asarray(jax.vmap(function)(*flat)).reshape(SIZES)


def check_kinds(kernel_mod, expected):
    assert sorted(x.kind for x in kernel_mod.operands) == sorted(expected)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name):
    function, kinds = MASK_MODS[name]
    mask = as_mask(function).bind(*SIZES)
    kernel_mod, arrays = split(traced_mask(mask), SIZES, "mask")
    shapes_fit(kernel_mod, arrays)
    check_kinds(kernel_mod, kinds)
    assert not any(x.floating for x in kernel_mod.operands if x.kind == "scores")
    np.testing.assert_array_equal(evaluated(kernel_mod, arrays), every_pair(function))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name):
    function, kinds = SCORE_MODS[name]
    kernel_mod, arrays = split(traced_score_mod(function), SIZES, "score_mod")
    shapes_fit(kernel_mod, arrays)
    check_kinds(kernel_mod, kinds)
    scores = np.random.default_rng(1).normal(size=SIZES).astype(np.float32)
    expected = every_pair(function, scores)
    np.testing.assert_allclose(evaluated(kernel_mod, arrays, scores), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["documents", "dilated", "relative table", "constant table"])
@pytest.mark.parametrize("where", ["jit", "TPU"])
def test_split_while_something_else_is_traced(name, where):
    function, _ = MASK_MODS[name]
    kept = []

    def trace(x):
        mod = traced_mask(as_mask(function).bind(*SIZES))
        kept.append(split(mod, SIZES, "mask")[0])
        return x, split(mod, SIZES, "mask")[1]

    if where == "TPU":  # it is not here, and nothing may be run on it
        device = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", platform="tpu", num_cores=1)
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), auto, abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            made = jax.eval_shape(trace, 0)[1]
        assert all(x.kind != "scores" for x in kept[0].operands)
        shapes_fit(kept[0], made)
        return
    _, arrays = jax.jit(trace)(0)
    np.testing.assert_array_equal(evaluated(kept[0], arrays), every_pair(function))


def test_captured_arrays_may_be_traced():
    kept = []

    @jax.jit
    def operands(ids, table):
        def function(b, h, q, k):
            return (ids[b, q] != 1) & (table[h, q - k + SK - 1] > 0)

        kernel_mod, arrays = split(traced_mask(as_mask(function).bind(*SIZES)), SIZES, "mask")
        kept.append(kernel_mod)
        return arrays

    arrays = operands(Q_IDS, RELATIVE)
    check_kinds(kept[0], ["q", "relative"])
    expected = every_pair(lambda b, h, q, k: (Q_IDS[b, q] != 1) & (RELATIVE[h, q - k + SK - 1] > 0))
    np.testing.assert_array_equal(evaluated(kept[0], arrays), expected)


def test_gradients_pass_through_operands():
    """JAX carries those of the rows on to the arrays."""
    cotangent = np.random.default_rng(2).normal(size=SIZES).astype(np.float32)
    scores = np.zeros(SIZES, np.float32)

    def by_kernel(table, weights):
        def function(s, b, h, q, k):
            return s + table[h, bucket(q - k)] * weights[b, k]

        kernel_mod, arrays = split(traced_score_mod(function), SIZES, "score_mod")
        check_kinds(kernel_mod, ["relative", "kv"])
        assert all(x.floating for x in kernel_mod.operands)
        total, q, k = 0.0, np.arange(SQ)[None, :], np.arange(SK)[:, None]
        for b, h in np.ndindex(B, H):
            loaded = [
                x[0, h, 0][q - k + SK - 1] if operand.kind == "relative" else x[b, 0].T
                for operand, x in zip(kernel_mod.operands, arrays, strict=True)
            ]
            tile = kernel_mod(loaded, jnp.asarray(scores[b, h].T), b, h, q, k)
            total += (tile * cotangent[b, h].T).sum()
        return total

    def by_formula(table, weights):
        b, h, q, k = np.ix_(*(np.arange(n) for n in SIZES))
        return (table[h, bucket(q - k)] * weights[b, k] * cotangent).sum()

    arrays = BUCKETS, BY_KEY
    got, want = (jax.jit(jax.grad(f, (0, 1)))(*arrays) for f in (by_kernel, by_formula))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + TABLE[q, k],
        lambda s, b, h, q, k: s + RELATIVE[h, q + k],
        lambda s, b, h, q, k: s + jnp.sin(WEIGHTS[(q * k) % 3]),
        lambda s, b, h, q, k: s + RELATIVE[h, jnp.int32(s)],
    ],
    ids=["[q, k]", "[q + k]", "[q · k]", "[score]"],
)
def test_arrays_that_are_indexed_otherwise_are_refused(function):
    message = r"score_mod: it reads an array at an index .* bias= .* implementation='blockwise'"
    with pytest.raises(NotImplementedError, match=message):
        split(traced_score_mod(function), SIZES, "score_mod")
    small = WHOLE[:3, :3]  # fewer entries than scores
    mask = as_mask(lambda b, h, q, k: small[q % 3, k % 3]).bind(*SIZES)
    with pytest.raises(NotImplementedError, match=r"^mask: it reads .* mask=, if it is boolean"):
        split(traced_mask(mask), SIZES, "mask")


@pytest.mark.parametrize("shape", [(SQ, SK), (B, 1, SQ, SK), (1, H, SQ, SK), (B, H, SQ, SK)])
def test_large_boolean_arrays_are_tiles(shape):
    array = np.random.default_rng(3).random(shape) < 0.5
    mask = (as_mask(array) & masks.causal()).bind(*SIZES)
    kernel_mod, arrays = split(traced_mask(mask), SIZES, "mask")
    check_kinds(kernel_mod, ["scores"])
    shapes_fit(kernel_mod, arrays)
    assert arrays[0].shape == (1,) * (4 - len(shape)) + shape
    np.testing.assert_array_equal(evaluated(kernel_mod, arrays), visible_pairs(mask, SIZES))


def test_what_is_read_is_linear_in_the_lengths():
    long = 1, 2, 3000, 5000
    names = [name for name, (_, kinds) in MASK_MODS.items() if "scores" not in kinds]
    for name in names:
        mod = traced_mask(as_mask(MASK_MODS[name][0]).bind(*long))
        _, arrays = jax.eval_shape(lambda mod=mod: (0, split(mod, long, "mask")[1]))
        assert all(x.size <= 2 * 2 * (3000 + 5000) for x in arrays), name


def test_a_number_is_a_mods_own_only_once():
    """Cheap arithmetic on rows is left to the kernel, which then reads each array once."""

    def function(s, b, h, q, k):
        return (s + BY_KEY[b, k]) * BY_KEY[b, k] - WEIGHTS[h] * WEIGHTS[h]

    kernel_mod, _ = split(traced_score_mod(function), SIZES, "score_mod")
    assert len(kernel_mod.operands) <= 3


BANDS = [
    (masks.full(), (None, None)),
    (masks.causal(), (None, 3)),
    (masks.causal(offset=-2), (None, -2)),
    (masks.sliding_window(4), (0, 3)),
    (masks.local(5, 2), (-5, 2)),
    (masks.causal() & masks.local(5, 20), (-5, 3)),
    (masks.full() & masks.sliding_window(4), (0, 3)),
    (masks.causal() | masks.local(5, 2), (None, 3)),
    (~masks.causal(), (4, None)),
    (~masks.full(), mods.NOTHING),
    (masks.causal(-1) & masks.local(0, 9), mods.NOTHING),
    (masks.causal(offset=20), (None, None)),
    (~masks.local(2, 2), None),  # two of them
    (masks.causal(offset=np.array([4, 5])), None),
    (masks.causal() & masks.lengths(kv=4), None),
    (masks.streaming(sinks=1, window=2), None),
    (as_mask(lambda b, h, q, k: k <= q), (None, 0)),
    (as_mask(lambda b, h, q, k: q >= k), (None, 0)),
    (as_mask(lambda b, h, q, k: (k <= q) & (q - k < 4)), (-3, 0)),
    (as_mask(lambda b, h, q, k: jnp.abs(q - k) <= 2), (-2, 2)),
    (as_mask(lambda b, h, q, k: 2 * k - 2 * q > 3), (2, None)),
    (as_mask(lambda b, h, q, k: q - k > -SK), (None, None)),
    (as_mask(lambda b, h, q, k: q - k > SQ), mods.NOTHING),
    (as_mask(lambda b, h, q, k: jnp.bool_(True)), (None, None)),
    (as_mask(lambda b, h, q, k: jnp.bool_(False)), mods.NOTHING),
    (as_mask(lambda b, h, q, k: (q - k) % 3 == 0), None),
    (as_mask(lambda b, h, q, k: q + k < 9), None),
    (as_mask(lambda b, h, q, k: k <= 2 * q), None),
    (as_mask(lambda b, h, q, k: k <= q + h), None),
]


@pytest.mark.parametrize(("mask", "expected"), BANDS, ids=[f"{n}, {m}" for n, (m, _) in
                         enumerate(BANDS)])  # fmt: skip
def test_bands(mask, expected):
    mask = mask.bind(*SIZES)
    found = find_band(mask, SIZES)
    assert found == expected
    if found is not None:
        visible = visible_pairs(mask, SIZES)
        np.testing.assert_array_equal(np.broadcast_to(within(found), SIZES), visible)


def test_a_traced_offset_is_no_known_band():
    found = []

    @jax.jit
    def trace(offset):
        found.append(find_band(masks.causal(offset).bind(*SIZES), SIZES))
        found.append(find_band(masks.causal().bind(*SIZES), SIZES))
        return offset

    trace(3)
    assert found == [None, (None, 3)], "that which is known is, whatever is traced around it"
