"""What kernels load of masks and score functions, and the way back of their gradients."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu import operands
from smalti.attention.tpu.mods import KernelMod, Operand
from smalti.attention.tpu.place import Place, place_of
from smalti.attention.tpu.tiles import Blocks, Part, TileClass, Walk
from smalti.tpu.lanes import round_up
from tests.attention.tpu.walks import NOTHING_HELD

KEYS = (16, 48, 128, 256, 512)  # of a part: narrow ones in GRAIN, others in LANES
QUERIES = (128, 256, 512)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_kernel(function, like, *arrays):
    """``function(*arrays)`` inside of a kernel."""

    def kernel(*refs):
        *inputs, out = refs
        out[...] = function(*(ref[...] for ref in inputs))

    return np.asarray(pl.pallas_call(kernel, like, interpret=True)(*arrays))


real_roll = pltpu.roll


def roll(x, shift, axis, *, stride, stride_axis):
    """`pltpu.roll`, whose interpretation takes seconds to compile: a row at a time."""
    assert (axis, stride_axis) == (1, 0)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, x.shape, n) for n in (0, 1))
    return jnp.take_along_axis(x, (lane - shift - stride * row) % x.shape[1], axis=1)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(operands.pltpu, "roll", roll)


@pytest.mark.parametrize("shift", [0, 1, 121, 128])
def test_rolls_are_those_of_the_fixture(shift):
    x = normal(8, 128)
    options = {"shift": shift, "axis": 1, "stride": 1, "stride_axis": 0}
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    rolled = in_kernel(functools.partial(real_roll, **options), like, x)
    np.testing.assert_array_equal(rolled, roll(x, **options))
    assert rolled[0, shift % 128] == x[0, 0]
    assert rolled[1, (shift + 1) % 128] == x[1, 0]


def by_difference(row, keys: int, queries: int):
    """By plain indexing: of a row by ``query − key``, that of ``−keys``, rounded up, first."""
    query, key = np.arange(queries)[None, :], np.arange(keys)[:, None]
    return row[0, query - key + round_up(keys)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("keys", KEYS)
def test_a_row_by_difference(keys, queries):
    row = normal(1, round_up(keys) + queries)
    like = jax.ShapeDtypeStruct((keys, queries), jnp.float32)
    load = functools.partial(operands._by_difference, keys=keys, queries=queries)
    np.testing.assert_array_equal(in_kernel(load, like, row), by_difference(row, keys, queries))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("keys", KEYS)
def test_sums_by_difference(keys, queries):
    """The transpose of the above."""
    tile = normal(keys, queries)
    length = round_up(keys) + queries
    expected = np.zeros((1, length), np.float64)
    query, key = np.arange(queries)[None, :], np.arange(keys)[:, None]
    np.add.at(expected[0], query - key + round_up(keys), tile)
    like = jax.ShapeDtypeStruct((1, length), jnp.float32)
    summed = in_kernel(operands._sum_by_difference, like, tile)
    np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-4)
    row = normal(1, length, seed=1)
    by_sums = (summed.astype(float) * row).sum()
    by_tile = (tile.astype(float) * by_difference(row, keys, queries)).sum()
    np.testing.assert_allclose(by_sums, by_tile, rtol=1e-4)


BLOCKS = Blocks(256, 384, 128, 512, 768)


def walk_of(q_len: int, kv_len: int) -> Walk:
    classes = ((TileClass((Part(0, 256, 0, 384),), None),),)
    lists = np.array([[[2, 1 << 16 | 3, 1]]], np.int32)
    return Walk(
        lists=lists, **NOTHING_HELD, classes=classes, blocks=BLOCKS, q_len=q_len, kv_len=kv_len,
        entries=(1, 1), empty_rows=True, empty_in_bands=True,
    )  # fmt: skip


WALK = walk_of(700, 900)
# Where a tile is, in the second major blocks of queries and of keys.
PLACE = Place(
    b=1, h=2, q=0, kv=128, q_global=512, kv_global=768 + 128, kv_major=768,
    q_len=WALK.q_len, kv_padded=WALK.kv_padded,
)  # fmt: skip
PARTS = [
    Part(0, 256, 0, 384),
    Part(128, 256, 128, 256),
    Part(128, 256, 0, 128),
    Part(0, 128, 256, 272),
    Part(128, 256, 0, 16, place=384),  # the first keys of the major block
]


# The tiles of a relative operand lie on a grid.
BY_PART = [
    (kind, part)
    for kind in ("number", "q", "kv", "relative", "scores")
    for part in PARTS
    if kind != "relative" or part.place is None
]


def indices_of(part: Part):
    """Queries ``[1, n]`` and keys ``[n, 1]`` in the sequence."""
    query = 512 + np.arange(part.q_start, part.q_stop)[None, :]
    key = (768 if part.place is not None else 896) + np.arange(part.kv_start, part.kv_stop)
    return query, key[:, None]


def test_the_place_of_a_tile():
    at = SimpleNamespace(b=1, hkv=1, g=0, i=1, j=1)
    grid = SimpleNamespace(walk=WALK, q_head=lambda at: 2 * at.hkv + at.g)
    assert place_of(1, WALK.lists[0], at, grid) == PLACE
    for part in PARTS:
        query, key = indices_of(part)
        np.testing.assert_array_equal(PLACE.q_indices(part), query)
        np.testing.assert_array_equal(PLACE.kv_indices(part), key)
        queries: Any = PLACE.queries(part)  # dynamic slices
        keys: Any = PLACE.keys(part)
        assert (queries.start, queries.size) == (query[0, 0] - 512, query.size)
        assert (keys.start, keys.size) == (key[0, 0] - 768, key.size)


def block_of(kind: Any, array: np.ndarray) -> np.ndarray:
    """What a kernel has of a padded operand, at `PLACE`."""
    return {
        "number": array[:, :, 0, 0],
        "q": array[0, 0, :, 512:1024],
        "kv": array[0, 0, :, 768:1536],
        "relative": array[0, 0],
        "scores": array[0, 0, 512:1024, 768:1536],
    }[kind]


# Their axes of queries and keys.
SHAPES = {
    "number": (1, 1),
    "q": (700, 1),
    "kv": (1, 900),
    "relative": (1, 900 - 1 + 700),
    "scores": (700, 900),
}


def drawn(kind: Any) -> np.ndarray:
    return normal(*((2, 3) if kind == "number" else (1, 1)), *SHAPES[kind])


def padded(kind: Any, array) -> np.ndarray:
    mod = KernelMod((Operand(kind, True),), (), {}, (), (), None)
    (found,) = operands.padded(mod, [jnp.asarray(array)], WALK)
    return np.asarray(found)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("kind", "part"), BY_PART)
def test_operands_are_loaded_by_part(kind, part):
    operand, array = Operand(kind, True), drawn(kind)
    query, key = indices_of(part)
    shape = key.size, query.size

    def kernel(ref, out):
        out[...] = jnp.broadcast_to(operands.load(operand, ref, part, PLACE), shape)

    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    block = block_of(kind, padded(kind, array))
    found = np.asarray(pl.pallas_call(kernel, like, interpret=True)(block))
    # Past the ends anything may be loaded.
    real = np.broadcast_to((query < 700) & (key < 900), shape)
    q, k = np.minimum(query, 699), np.minimum(key, 899)
    expected = {
        "number": lambda: array[1, 2, 0, 0],
        "q": lambda: array[0, 0, q, 0],
        "kv": lambda: array[0, 0, 0, k],
        "relative": lambda: array[0, 0, 0, q - k + 899],
        "scores": lambda: array[0, 0, q, k],
    }[kind]()
    np.testing.assert_array_equal(found[real], np.broadcast_to(expected, shape)[real])


# Where the part's queries and keys are all real, so that its gradients all count.
INSIDE = Place(0, 0, 256, 384, 256, 384, 0, WALK.q_len, WALK.kv_padded)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("kind", "part"), [x for x in BY_PART if x[0] != "scores"])
def test_gradients_are_added_where_the_operand_was_read(kind, part):
    operand, array = Operand(kind, True), drawn(kind)[:1, :1]
    q = INSIDE.q_global + np.arange(part.q_start, part.q_stop)[None, :]
    first = INSIDE.kv_global if part.place is None else INSIDE.kv_major
    k = first + np.arange(part.kv_start, part.kv_stop)[:, None]
    tile = normal(k.size, q.size)
    whole = padded(kind, array)
    length = 128 if kind == "number" else whole.shape[3]

    def kernel(tile_ref, out):
        out[...] = jnp.zeros(out.shape, jnp.float32)
        for _ in range(2):
            operands.add_gradient(operand, out, tile_ref[...], part, INSIDE)

    like = jax.ShapeDtypeStruct((1, length), jnp.float32)
    found = pl.pallas_call(kernel, like, interpret=True)(tile)
    found = operands.summed(operand, found[None, None], array, WALK)
    assert found.shape == array.shape
    expected = np.zeros(array.shape, np.float64)
    at = {
        "number": (0, 0, 0, 0 * (q + k)),
        "q": (0, 0, q + 0 * k, 0),
        "kv": (0, 0, 0, k + 0 * q),
        "relative": (0, 0, 0, q - k + 899),
    }[kind]
    np.add.at(expected, at, 2.0 * tile)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("q_len", "kv_len"), [(700, 900), (1, 1), (512, 768), (513, 100)])
@pytest.mark.parametrize("kind", ["q", "kv", "relative"])
def test_padding_is_taken_away_again(kind, q_len, kv_len):
    """And what entries share is the sum over them."""
    walk, operand = walk_of(q_len, kv_len), Operand(kind, True)
    shape = {"q": (q_len, 1), "kv": (1, kv_len), "relative": (1, kv_len - 1 + q_len)}[kind]
    mod = KernelMod((operand,), (), {}, (), (), None)
    for batch, heads in [(1, 1), (2, 1), (1, 3), (2, 3)]:
        array = normal(batch, heads, *shape)
        (found,) = operands.padded(mod, [jnp.asarray(array)], walk)
        lengths = {"q": walk.q_padded, "kv": walk.kv_padded}
        lengths["relative"] = walk.q_padded + walk.kv_padded
        assert found.shape == (batch, heads, 1, lengths[kind])
        every = np.broadcast_to(found, (2, 3, *found.shape[2:]))
        back = operands.summed(operand, jnp.asarray(every), array, walk)
        np.testing.assert_allclose(back, array * (6 // (batch * heads)), rtol=1e-6)


def test_numbers_are_summed_over_lanes_and_entries():
    partial = normal(2, 3, 1, 128)
    for batch, heads in [(1, 1), (2, 1), (1, 3), (2, 3)]:
        like = np.zeros((batch, heads, 1, 1))
        found = operands.summed(Operand("number", True), jnp.asarray(partial), like, WALK)
        expected = partial.sum((2, 3), keepdims=True)
        expected = expected.sum(tuple(n for n in (0, 1) if like.shape[n] == 1), keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
