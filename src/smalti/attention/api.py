"""`smalti.attention`: one function for every mask, score function, layout and platform."""

from __future__ import annotations

import jax

from smalti.attention.blockwise import blockwise
from smalti.attention.choice import IMPLEMENTATIONS, Choice, choose
from smalti.attention.reference import reference
from smalti.attention.tpu.block_sizes import check as check_pallas_block_sizes
from smalti.attention.tpu.vjp import pallas
from smalti.attention.tpu.vjp import refusal as pallas_refusal
from smalti.attention.validation import (
    Canonical,
    canonical,
    check_block_mask_tiles,
    check_block_sizes,
    suggest,
)
from smalti.masks import BlockMask
from smalti.tpu.launch import check_interpret


def attention(
    q,
    k,
    v,
    *,
    mask=None,
    score_mod=None,
    bias=None,
    segment_ids=None,
    softcap=None,
    scale=None,
    sinks=None,
    layout="BSHD",
    return_lse=False,
    implementation=None,
    block_sizes=None,
    interpret=None,
):
    """``softmax(softcap(score_mod(scale · q kᵀ)) + bias, masked) v``.

    Args:
      q: queries ``[B, Sq, Hq, D]``, float32, bfloat16 or float16.
      k: keys ``[B, Sk, Hkv, D]``, of q's dtype. ``Hq`` is a multiple of ``Hkv``: query head ``h``
        reads key head ``h // (Hq // Hkv)``; nothing is repeated in memory.
      v: values ``[B, Sk, Hkv, Dv]``, of q's dtype.
      mask: who sees whom: a mask of `smalti.masks` (``causal()``, ``sliding_window(512)``, …,
        combined with ``&``, ``|``, ``~``), a `BlockMask`, a function
        ``mask_mod(b, h, q_idx, kv_idx)`` of int32 scalars, or a boolean array that broadcasts to
        ``[B, Hq, Sq, Sk]``. None: everybody sees everything.
      score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, a function of a float32 scalar and int32
        scalars; arrays that it captures have gradients.
      bias: added after the cap; broadcasts to ``[B, Hq, Sq, Sk]``. −inf hides a key.
      segment_ids: int32 ``[B, S]`` or a pair ``([B, Sq], [B, Sk])``; a query sees its own segment
        only. Negative ids are padding that nobody sees.
      softcap: ``softcap · tanh(score / softcap)``; a positive Python float.
      scale: a Python float; ``1/sqrt(D)`` by default.
      sinks: ``[Hq]``: one more logit a head, neither scaled nor capped, that takes weight and has
        no value.
      layout: "BSHD" as above, or "BHSD": q ``[B, Hq, Sq, D]`` and so on, the result too.
      return_lse: also return the logarithm of the softmax's denominator, sinks included.
      implementation: "reference", "blockwise", "pallas", or None to pick: on a TPU "pallas", but
        "blockwise" for what its kernels cannot do: float16, and a ``score_mod`` or mask that reads
        an array at an index of query and key that is not their difference; elsewhere "blockwise".
        `explain_choice` says which and why. A named one never falls back. "reference" alone has
        derivatives in forward mode and of second order.
      block_sizes: `BlockSizes`, for implementations with tiles; None picks them. With a
        `BlockMask` they may only repeat its own; without them its tiles may be joined or split
        ("blockwise"), or its mask cut anew, where it is known and the same for all batch entries
        and heads ("pallas").
      interpret: for "pallas": True, or a ``pltpu.InterpretParams``, runs the kernels in an
        interpreter, on any platform and slowly.

    Returns:
      ``out [B, Sq, Hq, Dv]`` in q's dtype; with ``return_lse`` the pair ``(out, lse)``, lse
      ``[B, Hq, Sq]`` float32, natural logarithm. A row without a visible key is 0, its lse −inf
      (with sinks: the sink logit), its gradients 0.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says which and what to do.
      NotImplementedError: a named implementation cannot do what is asked.

    Arrays that are sharded over several TPUs: call it inside of `jax.shard_map` with batch or heads
    mapped, for XLA cannot partition kernels by itself.

    Scores, softmax and sums are float32; float32 products run at highest precision unless
    ``jax.default_matmul_precision`` says otherwise.
    """
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse: got {return_lse!r}; it must be True or False.")
    call, choice = _prepare(
        q,
        k,
        v,
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        segment_ids=segment_ids,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        layout=layout,
        implementation=implementation,
        block_sizes=block_sizes,
        interpret=interpret,
    )
    options = {
        "bias": call.bias,
        "sinks": call.sinks,
        "scale": call.scale,
        "softcap": call.softcap,
    }
    arrays = call.q, call.k, call.v
    # A compiled program still says by this name what ran.
    with jax.named_scope(f"smalti.attention[{choice.implementation}]"):
        if choice.implementation == "reference":
            dense = call.mask.mask if isinstance(call.mask, BlockMask) else call.mask
            out, lse = reference(*arrays, mask=dense, score_mod=call.score_mod, **options)
        elif choice.implementation == "blockwise":
            out, lse = blockwise(
                *arrays,
                mask=call.mask,
                score_mod=call.score_mod,
                block_sizes=block_sizes,
                **options,
            )
        else:
            out, lse = pallas(
                *arrays,
                mask=call.mask,
                score_mod=call.score_mod,
                layout=layout,
                block_sizes=block_sizes,
                interpret=interpret or False,
                **options,
            )
    if layout == "BSHD":
        out = out.swapaxes(1, 2)
    return (out, lse) if return_lse else out


def explain_choice(
    q, k, v, *, implementation=None, block_sizes=None, interpret=None, **arguments
) -> Choice:
    """Which implementation `attention` would run for the same arguments, and why.

    q, k and v may be `jax.ShapeDtypeStruct`. Raises what `attention` would raise.
    """
    names = ("mask", "score_mod", "bias", "segment_ids", "softcap", "scale", "sinks")
    for name in arguments:
        try:
            suggest("explain_choice's argument", name, (*names, "layout", "return_lse"))
        except ValueError as error:
            raise TypeError(str(error)) from None
    options = {"implementation": implementation, "block_sizes": block_sizes, "interpret": interpret}
    arguments = {**dict.fromkeys(names), "layout": "BSHD", **arguments, **options}
    arguments.pop("return_lse", None)
    choices = []

    def prepare(q, k, v):
        choices.append(_prepare(q, k, v, **arguments)[1])

    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in (q, k, v))
    jax.eval_shape(prepare, q, k, v) if abstract else prepare(q, k, v)
    return choices[0]


def _prepare(
    q, k, v, *, implementation, block_sizes, interpret, **arguments
) -> tuple[Canonical, Choice]:
    """The checked arguments, and what runs them."""
    check_block_sizes(block_sizes)
    check_interpret(interpret)
    if implementation is not None:
        suggest("implementation", implementation, IMPLEMENTATIONS)
    call = canonical(q, k, v, **arguments)
    choice = choose(
        implementation,
        block_sizes=block_sizes,
        interpret=interpret,
        refusal=lambda: pallas_refusal(call),
    )
    check_block_mask_tiles(arguments["mask"], block_sizes)
    if choice.implementation == "pallas" and block_sizes is not None:
        check_pallas_block_sizes(block_sizes)
    return call, choice
