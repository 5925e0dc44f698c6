"""smalti and what JAX users have beside it: each as a call that returns when the result is there.

A call returns `out`, or `(out, dq, dk, dv)` with the backward pass, all `[B, S, H, D]`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import smalti
from smalti.lab.bench.cases import SINK_TOKENS, WINDOW, Case, Inputs, visible


def build(name: str, case: Case, inputs: Inputs) -> Callable[[], Any]:
    attend, extra = {"smalti": _ours, "jax.nn": _jax_nn, "plain": _plain}[name](case, inputs)
    arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
    q, k, v, dout = (jnp.asarray(x, case.dtype) for x in arrays)

    @jax.jit
    def forward(q, k, v, extra):
        return attend(q, k, v, extra)

    @jax.jit
    def forward_backward(q, k, v, extra, dout):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, extra), q, k, v)
        return out, *vjp(dout)

    if case.backward:
        return lambda: jax.block_until_ready(forward_backward(q, k, v, extra, dout))
    return lambda: jax.block_until_ready(forward(q, k, v, extra))


def _ours(case: Case, inputs: Inputs):
    masks = smalti.masks
    if case.mask == "documents":
        # Known at run time only, as in training: the ids are an argument of the program.
        def attend(q, k, v, ids):
            return smalti.attention(q, k, v, mask=masks.document(ids) & masks.causal())

        return attend, jnp.asarray(inputs.ids)[None]
    mask = {
        "causal": lambda: masks.causal(),
        "window": lambda: masks.sliding_window(WINDOW),
        "streaming": lambda: masks.streaming(sinks=SINK_TOKENS, window=WINDOW),
        "documents-known": lambda: masks.document(inputs.ids[None]) & masks.causal(),
    }[case.mask]()
    return (lambda q, k, v, _: smalti.attention(q, k, v, mask=mask)), None


def _jax_nn(case: Case, inputs: Inputs):
    attention = jax.nn.dot_product_attention
    if case.mask == "causal":
        return (lambda q, k, v, _: attention(q, k, v, is_causal=True, implementation="xla")), None
    if case.mask == "window":

        def attend(q, k, v, _):
            window = (WINDOW - 1, 0)
            return attention(
                q, k, v, is_causal=True, local_window_size=window, implementation="xla"
            )

        return attend, None
    i = jnp.arange(case.S)
    seen = visible(case.mask, i[:, None], i[None, :], jnp.asarray(inputs.ids))[None, None]
    return (lambda q, k, v, seen: attention(q, k, v, mask=seen, implementation="xla")), seen


def _plain(case: Case, inputs: Inputs):
    def attend(q, k, v, ids):
        i = jnp.arange(case.S)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=jnp.float32)
        seen = visible(case.mask, i[:, None], i[None, :], ids)
        scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bhij,bjhd->bihd", weights, v)

    return attend, jnp.asarray(inputs.ids)
