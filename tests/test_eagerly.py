"""Values that are needed while something else is being traced."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from smalti.eagerly import eagerly, remembered
from smalti.masks.mask_mod import MaskMod


def add(x, y):
    return {"sum": jnp.asarray(x) + y, "kept": x}


def test_results_are_numpy_arrays():
    found = eagerly(add, np.arange(3), 2)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(found))
    np.testing.assert_array_equal(found["sum"], [2, 3, 4])
    assert eagerly(lambda: None) is None


@pytest.mark.parametrize(
    "transformed",
    [
        jax.jit,
        jax.grad,
        jax.vmap,
        lambda f: jax.jit(jax.vmap(jax.grad(f))),
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x),
        lambda f: lambda x: jax.lax.map(f, x),
    ],
    ids=["jit", "grad", "vmap", "all three", "checkpoint", "scan", "map"],
)
def test_while_something_is_traced(transformed):
    found = []

    def function(x):
        known = eagerly(lambda: jnp.arange(4).sum() + jax.jit(jnp.cos)(0.0))
        assert float(known) == 7
        # It is no tracer: Python may branch on it, and it is part of the program as a constant.
        found.append(int(known) if known > 6 else None)
        return x * known

    x = jnp.float32(2) if transformed is jax.grad else jnp.ones(3)
    transformed(function)(x)
    assert found
    assert set(found) == {7}


def test_for_a_machine_that_is_not_here():
    """With a TPU's mesh in context nothing can be run on that mesh."""
    device = jax.sharding.AbstractDevice(
        device_kind="TPU v6 lite", platform="tpu", num_cores=1
    )  # fmt: skip
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), auto, abstract_device=device)
    meshes = []

    def function(x):
        def known():
            meshes.append(jax.sharding.get_abstract_mesh())
            return jnp.arange(3) + 1

        np.testing.assert_array_equal(eagerly(known), [1, 2, 3])
        return x

    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(function, jnp.ones(2))
        assert jax.sharding.get_abstract_mesh() == mesh
    assert meshes
    assert mesh not in meshes


def test_exceptions_pass_through():
    class OwnError(Exception):
        pass

    def fails(x):
        raise OwnError(x)

    with pytest.raises(OwnError, match="why"):
        eagerly(fails, "why")
    with pytest.raises(OwnError, match="why"):
        jax.jit(lambda x: eagerly(fails, "why"))(1)


def test_inside_of_itself():
    assert eagerly(lambda: eagerly(lambda: jnp.int32(3)) + 1) == 4


def test_no_thread_is_left():
    before = threading.active_count()
    for _ in range(3):
        eagerly(jnp.sin, 1.0)
    assert threading.active_count() == before


def test_equal_trees_are_looked_at_once():
    calls = []

    @remembered
    def look(tree, sizes):
        calls.append((tree, sizes))
        return len(calls)

    ids = np.arange(5)
    for tree, sizes, expected in (
        ({"a": 1}, 8, 1),
        ({"a": 1}, 8, 1),
        ({"a": 2}, 8, 2),
        ({"a": 1}, 9, 3),
        ({"b": 1}, 8, 4),
        (ids, 8, 5),
        (ids.copy(), 8, 5),
        (ids.astype(np.int32), 8, 6),
        (ids[:4], 8, 7),
        (jnp.arange(6), 8, 8),
        (jnp.arange(6), 8, 8),
        (jnp.arange(6.0), 8, 9),
    ):
        assert look(tree, sizes) == expected


TABLE = jnp.arange(8)
CAPTURING = MaskMod(lambda b, h, q, k: TABLE[q] >= TABLE[k])


def test_masks_of_known_jax_arrays_are_looked_at_once_also_while_something_is_traced():
    calls = []

    @remembered
    def look(mask, sizes):
        calls.append(mask)

    @jax.jit
    def layers(x):
        for ids in same:
            look((masks.document(ids) & CAPTURING).bind(1, 1, 8, 8), 8)
        return x

    same = [jnp.arange(8)[None] // 4 for _ in range(3)]
    layers(1.0)
    look((masks.document(same[0]) & CAPTURING).bind(1, 1, 8, 8), 8)
    assert len(calls) == 1
    look((masks.document(same[0] // 2) & CAPTURING).bind(1, 1, 8, 8), 8)
    assert len(calls) == 2


def test_what_is_traced_is_not_remembered():
    calls = []

    @remembered
    def look(tree, sizes):
        calls.append(tree)

    for _ in range(2):
        jax.jit(lambda x: look({"a": x}, 8))(jnp.ones(3))
    assert len(calls) == 2
    look(np.zeros(2**20), 8)
    look(np.zeros(2**20), 8)
    assert len(calls) == 4, "large arrays are not kept"
    look(jnp.zeros(2**20), 8)
    look(jnp.zeros(2**20), 8)
    assert len(calls) == 6
    look(jax.random.key(0), 8)
    look(jax.random.key(0), 8)
    assert len(calls) == 8, "random keys are no NumPy arrays"


def test_arrays_that_are_not_all_here_are_not_remembered(monkeypatch):
    calls, array = [], jnp.arange(3)

    @remembered
    def look(tree, sizes):
        calls.append(tree)

    monkeypatch.setattr(type(array), "is_fully_addressable", False)
    look(array, 8)
    look(array, 8)
    assert len(calls) == 2
