"""The attention kernel, interpreted; `test_api` has its values where a step takes a whole cache."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti.decode.tpu import blocks
from smalti.decode.tpu.blocks import Blocks
from tests.decode.calls import Case, check, compiled, decoded, ragged, step
from tests.decode.oracle import Rules
from tests.support.interpreter import STRICT, no_races

NARROW = {"Hq": 4, "Hkv": 2, "D": 8, "Dv": 8}
WIDE = {"Hq": 2, "Hkv": 1, "D": 128, "Dv": 128}


def in_blocks_of(heads: int, slots: int):
    """As many slots a step, where a kernel would take all of a cache as small as these."""
    return mock.patch.object(blocks, "choose", return_value=Blocks(heads, slots))


@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
def test_a_cache_in_several_blocks(sizes):
    """Of 128 slots, the last cut: by cells that are empty, half full, full and wrapped."""
    lengths = np.array([[8, 0, 8], [8, 3, 0], [0, 8, 8]])
    rules = Rules(5, 290, "cache")
    case = Case(rules, 8, lengths, **sizes)
    with in_blocks_of(sizes["Hkv"] if sizes is NARROW else 1, 128):
        check(case, "pallas")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize(("sinks", "window"), [(3, 253), (140, 120), (0, 130)])
def test_a_full_cache_in_several_blocks(sizes, sinks, window):
    """Long enough to wrap around in several blocks; some sink tokens fill blocks of their own."""
    lengths = np.where(np.arange(60)[:, None] < [60, 40], 8, [[3, 0]])
    case = Case(Rules(sinks, window, "cache"), 8, lengths, **sizes)
    with in_blocks_of(1, 128):
        check(case, "pallas")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
def test_nothing_is_read_that_was_not_written(sizes, dtype):
    """Memory starts as NaN, reads out of bounds raise, and races are found, of both kernels."""
    lengths = np.array([[2, 0], [3, 1], [3, 3]])
    case = Case(Rules(2, 4, "cache"), 3, lengths, dtype=dtype, **sizes)
    with no_races(launches=6):
        check(case, "pallas", interpret=STRICT)


@pytest.mark.slow
def test_blocks_without_a_token_race_with_nothing():
    case = Case(Rules(2, 190), 2, np.array([[2, 0], [2, 2]]), **NARROW)
    with in_blocks_of(2, 128), no_races(launches=4):
        check(case, "pallas", interpret=STRICT)


@pytest.mark.slow
def test_results_do_not_depend_on_blocks():
    lengths = ragged(4, 3, 2)
    case = Case(Rules(2, 300, "cache"), 4, lengths, **NARROW)
    whole, _ = decoded(case, "pallas")
    for heads, slots in ((1, 128), (2, 256)):
        with in_blocks_of(heads, slots):
            np.testing.assert_allclose(decoded(case, "pallas")[0], whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_what_a_query_no_longer_sees_may_be_anything(poison):
    """Of a full cache the oldest token of the window, which the new one replaces."""
    for implementation in ("reference", "pallas"):
        clean = Case(Rules(1, 4), 1, np.full((6, 1), 1), Hq=2, Hkv=1)
        dirty = Case(Rules(1, 4), 1, np.full((6, 1), 1), Hq=2, Hkv=1)
        for x in dirty.chunks[1:]:
            x[1] = poison  # seen by tokens 1 to 4, not by token 5
        expected, got = (decoded(case, implementation)[0][5] for case in (clean, dirty))
        np.testing.assert_array_equal(got, expected)
        assert not np.isfinite(decoded(dirty, implementation)[0][4]).any()


@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("pallas", marks=pytest.mark.slow)]
)
def test_shard_map_over_the_batch(implementation):
    """With its default checks, on one device: the types are those of several."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    case = Case(Rules(2, 5, "cache"), 2, np.array([[2, 1]]))
    P = jax.sharding.PartitionSpec
    call = step(case, implementation)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    chunk = *(jnp.asarray(x[0]) for x in case.chunks), case.lengths[0]
    got, expected = (compiled(f)(case.empty(), chunk) for f in (mapped, call))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
