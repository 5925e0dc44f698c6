"""FlexAttention: attention over the live tiles of a `BlockMask`, with a score function."""

from __future__ import annotations

import warnings

import numpy as np
from jax import core

from smalti.attention.api import attention
from smalti.backend import target_platform
from smalti.masks import BlockMask, build_block_mask
from smalti.masks import causal as causal_mask


def flex_pallas_attention(q, k, v, block_mask: BlockMask, causal: bool = True, score_mod=None):
    """``softmax(score_mod(q kᵀ / sqrt(D)), masked) v`` over the tiles that a mask leaves alive.

    What `smalti.attention` with ``mask=block_mask, layout="BHSD"`` does, forward and backward: the
    Pallas kernels on a TPU, `blockwise` elsewhere.

    Args:
      q: ``[B, Hq, Sq, D]``; k ``[B, Hkv, Sk, D]``; v ``[B, Hkv, Sk, Dv]``, of one dtype: float32,
        bfloat16 or, off the TPU, float16. ``Hq`` is a multiple of ``Hkv``.
      block_mask: of `smalti.build_block_mask`, for these sizes.
      causal: whether queries see no later keys, whatever the mask says. The last query meets the
        last key. Warns where that empties tiles that the mask keeps: give ``causal=False`` for a
        mask that is meant to look ahead, such as a prefix-LM's.
      score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, a function of a float32 scalar and int32
        scalars; arrays that it captures have gradients.

    Returns:
      ``[B, Hq, Sq, Dv]`` in q's dtype. A row without a visible key is 0.

    Raises:
      ValueError: an argument is wrong; the message says which and what to do.
      NotImplementedError: on a TPU, what the kernels cannot do.
    """
    if not isinstance(block_mask, BlockMask):
        raise ValueError(
            f"block_mask: got {type(block_mask).__name__}; it must be a BlockMask. Write "
            "smalti.build_block_mask(mask_mod, batch, heads, seqlen, block_q, block_k), or use "
            "smalti.attention, which takes a mask as it is."
        )
    if not isinstance(causal, bool):
        raise ValueError(f"causal: got {causal!r}; it must be True or False.")
    if causal:
        block_mask = _with_causal(block_mask)
    implementation = "pallas" if target_platform() == "tpu" else None
    return attention(
        *(q, k, v),
        mask=block_mask,
        score_mod=score_mod,
        layout="BHSD",
        implementation=implementation,
    )


def _with_causal(block_mask: BlockMask) -> BlockMask:
    grid = block_mask.grid
    narrower = build_block_mask(
        block_mask.mask & causal_mask(),
        *(grid.batch, grid.heads, grid.q_len, grid.kv_len, grid.block_q, grid.block_kv),
    )
    kept, left = _num_live(block_mask), _num_live(narrower)
    if kept is not None and left is not None and left < kept:
        warnings.warn(
            f"flex_pallas_attention: causal=True empties {kept - left} of the {kept} tiles that "
            f"{block_mask.mask!r} keeps. Pass causal=False if its queries are meant to see later "
            "keys.",
            stacklevel=3,
        )
    return narrower


def _num_live(block_mask: BlockMask) -> int | None:
    """How many tiles are alive; None where that is traced."""
    runs = block_mask.q_runs
    if isinstance(runs.start, core.Tracer):
        return None
    return int((np.asarray(runs.stop) - np.asarray(runs.start)).sum())
