"""jax.nn.dot_product_attention as XLA compiles it: no kernel, whole scores in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from smalti.estimate.peers.case import AttentionCase
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call, Variant


def variants(case: AttentionCase, which: str) -> list[Variant]:
    """One: there is nothing to choose."""
    refused = None
    if case.value_dim != case.D:
        refused = f"dot_product_attention needs Dv = D, got Dv={case.value_dim} and D={case.D}"
    source = "jax.nn.dot_product_attention(implementation='xla')"
    return [Variant("xla", {}, source, lambda: _build(case, which), refused=refused)]


def _build(case: AttentionCase, which: str) -> Call:
    def forward(q, k, v):
        # It wants BSHD; to_bhsd's swap is its own inverse, and here it goes the other way.
        if case.layout == "BHSD":
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, scale=case.scale, implementation="xla", **_mask(case)
        )
        return jnp.swapaxes(out, 1, 2) if case.layout == "BHSD" else out

    return program("xla", forward, case, which)


def _mask(case: AttentionCase) -> dict:
    """Its own flags where they mean the same: its causal mask starts at the first key."""
    if not case.causal:
        return {}
    if case.Sq == case.Sk:
        window = {} if case.window is None else {"local_window_size": (case.window - 1, 0)}
        return {"is_causal": True, **window}
    last = jnp.arange(case.Sq)[:, None] + case.Sk - case.Sq
    key = jnp.arange(case.Sk)
    seen = key <= last
    if case.window is not None:
        seen &= key > last - case.window
    return {"mask": seen[None, None]}
