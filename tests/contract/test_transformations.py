"""Under jit, grad, vmap, checkpoint, scan and shard_map, with traced arguments, twice derived."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smalti import masks
from tests.support.calls import call, compiler_options
from tests.support.cases import per_head
from tests.support.inputs import Sizes, draw, normal

pytestmark = pytest.mark.slow

SIZES = Sizes(B=2, Sq=40, Sk=40, Hq=4, Hkv=2, D=8, Dv=8)
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 40)), 1).astype(np.int32)


def close(got, want, tolerance=2e-5):
    """The same computation, composed in another way: equal but for the order of sums."""
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)  # noqa: E731
    jax.tree.map(check, got, want)


def loss_of(implementation, **arguments):
    """A scalar of q, k, v and more arrays by name, using out and lse."""

    def loss(arrays):
        captured = (arrays["weight"],) if "weight" in arrays else ()
        rest = {n: x for n, x in arrays.items() if n in ("bias", "sinks", "segment_ids", "mask")}
        out, lse = call(
            *(arrays[name] for name in "qkv"),
            implementation=implementation,
            score_mod=per_head if captured else None,
            captured=captured,
            return_lse=True,
            **rest,
            **arguments,
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0))

    return loss


def arrays(implementation, **more) -> dict:
    inputs = draw(SIZES)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if implementation != "pallas":
        arrays["weight"] = normal(4, seed="weight")
    return jax.tree.map(jnp.asarray, {**arrays, "bias": normal(1, 4, 40, 40, seed="bias"), **more})


def tokens() -> dict:
    return {name: x for name, x in arrays("pallas").items() if name in "qkv"}


def jit(implementation):
    return functools.partial(jax.jit, compiler_options=compiler_options(implementation))


def test_grad_jit_checkpoint(implementation):
    loss, point = loss_of(implementation, mask=masks.causal(), softcap=3.0), arrays(implementation)
    want = jit(implementation)(jax.value_and_grad(loss))(point)
    close(jit(implementation)(jax.value_and_grad(jax.checkpoint(loss)))(point), want)
    close(loss(point), want[0])


def test_finite_differences(implementation):
    function = loss_of(implementation, mask=masks.causal(offset=-2), softcap=3.0)
    loss, gradient = jit(implementation)(function), jit(implementation)(jax.grad(function))
    point = arrays(implementation, sinks=normal(4))
    grads = gradient(point)
    for name, x in point.items():
        direction = normal(*x.shape, seed=name) / np.sqrt(x.size)
        step = lambda t, name=name, x=x, d=direction: loss({**point, name: x + t * d})  # noqa: E731
        slope = (step(0.02) - step(-0.02)) / 0.04
        np.testing.assert_allclose(jnp.sum(grads[name] * direction), slope, rtol=2e-2, atol=2e-3)


# Of these arrays by name, or of all.
AXES = [{"q": 0, "k": None, "v": 0, "weight": None, "bias": 0}, 0]


@pytest.mark.parametrize(
    ("implementation", "axes"),
    [
        *((name, axes) for name in ("reference", "blockwise") for axes in AXES),
        ("pallas", AXES[0]),
    ],
)
def test_vmap(implementation, axes):
    first = arrays(implementation)
    more = [first, jax.tree.map(lambda x: x[..., ::-1] * 0.9, first)]
    axes = {name: axes[name] if isinstance(axes, dict) else axes for name in first}
    points = [
        {name: (point if axes[name] == 0 else more[0])[name] for name in point} for point in more
    ]
    stacked = {
        name: jnp.stack([p[name] for p in points]) if axes[name] == 0 else points[0][name]
        for name in axes
    }
    both = jax.value_and_grad(loss_of(implementation, mask=masks.causal() & masks.document(IDS)))
    got = jit(implementation)(jax.vmap(both, in_axes=(axes,)))(stacked)
    both = jit(implementation)(both)
    for i, point in enumerate(points):
        close(jax.tree.map(lambda x, i=i: x[i], got), both(point))


def test_vmap_over_what_masks_capture(implementation):
    ids = jnp.stack([jnp.asarray(IDS), jnp.asarray(IDS[::-1])])
    lengths = jnp.array([[40, 3], [0, 17]], jnp.int32)

    def both(ids, length):
        loss = loss_of(implementation, mask=masks.lengths(kv=length), segment_ids=ids)
        return jax.value_and_grad(loss)(tokens())

    got = jit(implementation)(jax.vmap(both))(ids, lengths)
    both = jit(implementation)(both)
    for i in range(2):
        close(jax.tree.map(lambda x, i=i: x[i], got), both(ids[i], lengths[i]))


def test_scan_over_layers(implementation):
    loss = loss_of(implementation, mask=masks.causal())
    weights = normal(2, 4, seed="layers")
    point = tokens()

    def layer(carry, weight):
        out = loss({**point, "q": point["q"] * carry, "sinks": weight})
        return jnp.tanh(out), None

    def scanned(weights):
        return jax.lax.scan(layer, jnp.float32(1), weights)[0]

    def unrolled(weights):
        carry = jnp.float32(1)
        for weight in weights:
            carry, _ = layer(carry, weight)
        return carry

    got, want = (jit(implementation)(jax.grad(f))(weights) for f in (scanned, unrolled))
    close(got, want, tolerance=1e-4)


def _offset_each(offset):
    return {"mask": masks.streaming(sinks=2, window=5, offset=offset)}


def _mask_mod(first):
    return {"mask": lambda b, h, q_idx, kv_idx: first[q_idx] >= kv_idx}


def _block_mask(offset):
    return {"mask": masks.build_block_mask(masks.causal(offset=offset), 2, 4, 40, 40, 16, 8)}


# Arguments made of a traced value, and two of its values.
TRACED = {
    "segment_ids": (lambda x: {"segment_ids": x}, IDS, IDS - 1),
    "document": (lambda x: {"mask": masks.document(x) & masks.causal()}, IDS, IDS[::-1]),
    "lengths": (lambda x: {"mask": masks.lengths(q=x, kv=x)}, [40, 7], [0, 1]),
    "causal offset": (lambda x: {"mask": masks.causal(offset=x)}, 3, -4),
    "offset of each entry": (_offset_each, [0, 5], [-3, 9]),
    "prefix": (lambda x: {"mask": masks.prefix_lm(x)}, [3, 30], [0, 40]),
    "array": (lambda x: {"mask": x}, np.tri(40, dtype=bool), np.tri(40, k=-3, dtype=bool)),
    "mask_mod": (_mask_mod, np.arange(40), np.arange(40)[::-1]),
    "BlockMask": (_block_mask, 0, -9),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_masks_do_not_recompile(implementation, name):
    """One program for all values, with the results of the values known while tracing."""
    make, *values = TRACED[name]
    traces = []

    @jit(implementation)
    def traced(arrays, value):
        traces.append(None)
        return jax.value_and_grad(loss_of(implementation, **make(value)))(arrays)

    for value in values:
        value = jnp.asarray(value, None if np.asarray(value).dtype == bool else jnp.int32)
        known = jax.jit(jax.value_and_grad(loss_of("reference", **make(value))))
        close(traced(tokens(), value), known(tokens()))
    assert len(traces) == 1


def test_forward_mode_and_second_derivatives(implementation):
    """Right, or refused clearly."""
    loss = loss_of(implementation, mask=masks.causal(offset=-3), softcap=3.0)
    point = arrays(implementation, sinks=normal(4))
    tangents = jax.tree.map(lambda x: jnp.ones_like(x) * 0.1, point)

    def total(point):
        # Along one direction, not summed: a small number, so that its differences are exact.
        grads = jax.grad(loss)(point)
        return sum(jnp.sum(g * normal(*g.shape, seed=f"to {n}")) for n, g in grads.items()) / 20

    def derivative():
        return jit(implementation)(lambda p, t: jax.jvp(loss, (p,), (t,))[1])(point, tangents)

    def hessian_product():
        return jit(implementation)(jax.grad(total))(point)

    if implementation != "reference":
        with pytest.raises(TypeError, match="forward-mode"):
            derivative()
        with pytest.raises(NotImplementedError, match="implementation='reference'"):
            hessian_product()
        return
    grads = jit(implementation)(jax.grad(loss))(point)
    want = sum(jnp.sum(grads[name] * tangents[name]) for name in grads)
    np.testing.assert_allclose(derivative(), want, rtol=1e-4)
    hvp, total = hessian_product(), jit(implementation)(total)
    for name, x in point.items():
        direction = normal(*x.shape, seed=name) / np.sqrt(x.size)
        ahead, behind = ({**point, name: x + t * direction} for t in (0.02, -0.02))
        slope = (total(ahead) - total(behind)) / 0.04
        np.testing.assert_allclose(jnp.sum(hvp[name] * direction), slope, rtol=1e-2, atol=1e-3)


def test_arguments_may_be_numpy_arrays(implementation):
    inputs = draw(SIZES)
    out = call(inputs.q, inputs.k, inputs.v, implementation=implementation)
    assert isinstance(out, jax.Array)


def test_shard_map_with_its_default_checks():
    """Over eight simulated devices, by batch and heads, in a process of its own."""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sharded"],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
