import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import smalti
from smalti.estimate.compile.lowering import lower
from smalti.estimate.compile.target import find_target

from .kernels import X, double, v6e


def called_from_elsewhere(fn):
    return lower(fn, (X,), v6e())


def test_a_closure_lowers_to_the_same_program_wherever_it_is_lowered_from():
    factor = 3.0

    def fn(x):
        return double(x) * factor

    first = lower(fn, (X,), v6e())
    jax.clear_caches()
    assert called_from_elsewhere(fn) == first
    assert first.name == "fn"
    assert b"tpu_custom_call" in first.module
    assert b"test_lowering.py" in first.module


def test_only_shape_and_dtype_of_an_array_count():
    structs = lower(double, ({"x": X}["x"],), v6e())
    assert lower(double, (np.ones(X.shape, X.dtype),), v6e()) == structs


def test_kernels_see_the_chip_that_they_are_lowered_for():
    def fn(x):
        seen.append(pltpu.get_tpu_info().vmem_capacity_bytes)
        return x

    seen = []
    for chip in ("v5e", "v7x"):
        lower(fn, (X,), find_target(chip))
    assert seen == [128 * 2**20, 64 * 2**20]


def test_transposing_in_a_kernel_asks_for_the_chip():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T

    fn = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((128, 512), jnp.float32))
    assert b"tpu_custom_call" in lower(fn, (X,), v6e()).module


def test_attention_sees_a_tpu_and_not_this_machine():
    def fn(q):
        platforms.append(smalti.explain_choice(q, q, q).platform)
        return q

    platforms = []
    lower(fn, (jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16),), v6e())
    assert platforms == ["tpu"]


def test_shardings_are_over_the_mesh_of_the_slice():
    target = find_target("v6e", "v6e:4x4", {"data": 16})
    plain = lower(jnp.sin, (X,), target).module
    split = lower(jnp.sin, (X,), target, in_shardings=P("data")).module
    named = lower(jnp.sin, ({"a": X}["a"],), target, (P("data"),), P()).module
    assert len({plain, split, named}) == 3


def test_shard_map_takes_the_mesh_from_its_context():
    def fn(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(double(x, rows=32), "data"),
            in_specs=P("data"),
            out_specs=P(),
            check_vma=False,
        )(x)

    target = find_target("v6e", "v6e:4x4", {"data": 16})
    assert b"all_reduce" in lower(fn, (X,), target, P("data")).module


def test_donation_is_in_the_program():
    donated = lower(jnp.sin, (X,), v6e(), donate=(0,))
    assert b"tf.aliasing_output" in donated.module
    assert b"tf.aliasing_output" not in lower(jnp.sin, (X,), v6e()).module


def test_what_the_function_raises_passes_through():
    with pytest.raises(ValueError, match="Incompatible shapes for broadcasting"):
        lower(jnp.add, (X, jax.ShapeDtypeStruct((3,), jnp.float32)), v6e())


@pytest.mark.parametrize(
    ("arguments", "shardings", "text"),
    [
        (
            (X, {"n": [3]}),
            None,
            "argument 1['n'][0] is 3, which has no shape and dtype: give a jax.ShapeDtypeStruct or "
            "an array, or bind a Python value with functools.partial",
        ),
        (
            (X,),
            "data",
            "in_shardings and out_shardings hold 'data'; they are pytrees of "
            "jax.sharding.PartitionSpec over the axes of mesh_axes",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, shardings, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        lower(lambda *xs: xs[0], arguments, v6e(), in_shardings=shardings)
