"""What the tests of peers share: lowering for a TPU on a CPU, interpreted kernels, an answer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from smalti.estimate.peers import AttentionCase, Variant

# How a TPU kernel is lowered where there is no TPU: kernels ask the mesh's device for its kind.
V6E = AbstractMesh(
    (1,),
    ("x",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
)


def lower(variant: Variant) -> jax.export.Exported:
    fn, args = variant.fn, variant.args
    with jax.sharding.use_abstract_mesh(V6E):
        return jax.export.export(
            jax.jit(fn),
            platforms=["tpu"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tpu_custom_call")],
        )(*args)


def interpret(monkeypatch) -> None:
    """Runs Pallas kernels on the CPU. TPU interpret mode cannot: it fails on a mapped kernel."""
    real = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: real(*a, **{**k, "interpret": True}))
    jax.clear_caches()  # the libraries' own jits may hold the same kernel, not interpreted


def arrays(structs, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in structs]


def plain_attention(case: AttentionCase, q, k, v):
    """The whole score matrix, in the case's layout."""
    if case.layout == "BSHD":
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, case.Hq // case.Hkv, axis=1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / case.D**0.5
    last, key = jnp.arange(case.Sq)[:, None] + case.Sk - case.Sq, jnp.arange(case.Sk)
    seen = key <= last if case.causal else jnp.ones((case.Sq, case.Sk), bool)
    if case.window is not None:
        seen &= key > last - case.window
    out = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
    return jnp.swapaxes(out, 1, 2) if case.layout == "BSHD" else out
