"""jax.experimental.pallas.ops.tpu.flash_attention, with its default blocks and with larger ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from smalti.estimate.peers.arrays import clip, pad_length, padded_length, to_bhsd
from smalti.estimate.peers.case import AttentionCase
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call, Variant


class Blocks(NamedTuple):
    """The library's names; the backward kernels get the same three."""

    block_q: int
    block_k_major: int  # keys in VMEM
    block_k: int  # keys of one step


DEFAULT = Blocks(128, 128, 128)  # BlockSizes.get_default
GRID = (
    Blocks(1024, 1024, 512),
    Blocks(1024, 1024, 1024),
    Blocks(512, 1024, 512),
    Blocks(512, 512, 512),
    Blocks(512, 1024, 1024),
    Blocks(1024, 512, 512),
    Blocks(256, 512, 512),
    Blocks(256, 256, 256),
)


def variants(case: AttentionCase, which: str) -> list[Variant]:
    """The grid's members that fit this case, then the library's defaults."""
    grid = dict.fromkeys(
        Blocks(clip(q, case.Sq), clip(major, case.Sk), clip(k, case.Sk)) for q, major, k in GRID
    )
    grid.pop(DEFAULT, None)
    return [
        *(variant(case, which, blocks) for blocks in grid if _pads(case, blocks)),
        variant(case, which, DEFAULT, "BlockSizes.get_default"),
    ]


def variant(
    case: AttentionCase, which: str, blocks: Blocks, source: str = "smalti's grid"
) -> Variant:
    """One choice of blocks, which must divide one another."""
    return Variant(
        peer="jax_flash",
        blocks=blocks._asdict(),
        source=source,
        build=lambda: _build(case, which, blocks),
        refused=_refusal(case),
    )


def _refusal(case: AttentionCase) -> str | None:
    if case.window is not None:
        return "flash_attention has no sliding window"
    if case.causal and case.Sq != case.Sk:
        return "flash_attention's causal mask starts at the first key, so it needs Sq = Sk"
    if case.value_dim != case.D:
        return f"flash_attention needs Dv = D, got Dv={case.value_dim} and D={case.D}"
    return None


def _pads(case: AttentionCase, blocks: Blocks) -> tuple[int, int] | None:
    """The padded lengths of queries and keys, or None where these blocks do not fit together."""
    if case.causal:  # Sq = Sk, and so they must stay: the library masks by position
        length = padded_length(case.Sk, *blocks)
        return None if length is None else (length, length)
    keys = padded_length(case.Sk, blocks.block_k_major, blocks.block_k)
    queries = padded_length(case.Sq, blocks.block_q)
    return None if keys is None or queries is None else (queries, keys)


def _build(case: AttentionCase, which: str, blocks: Blocks) -> Call:
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    lengths = _pads(case, blocks)
    assert lengths is not None
    queries, keys = lengths
    sizes = library.BlockSizes(
        **blocks._asdict(),
        block_b=1,
        block_q_major_dkv=blocks.block_q,
        block_q_dkv=blocks.block_q,
        block_k_major_dkv=blocks.block_k_major,
        block_k_dkv=blocks.block_k,
        block_q_dq=blocks.block_q,
        block_k_major_dq=blocks.block_k_major,
        block_k_dq=blocks.block_k,
    )
    segments = None
    if keys != case.Sk and not case.causal:  # a causal mask hides the padding already
        padding = (np.arange(keys) >= case.Sk).astype(np.int32)
        segments = library.SegmentIds(
            q=np.zeros((case.B, queries), np.int32),  # pyright: ignore[reportArgumentType]
            kv=np.broadcast_to(padding, (case.B, keys)),  # pyright: ignore[reportArgumentType]
        )

    def forward(q, k, v):
        q, k, v = to_bhsd(case, q, k, v)
        k, v = (jnp.repeat(x, case.Hq // case.Hkv, axis=1) for x in (k, v))
        out = library.flash_attention(
            pad_length(q, queries),
            pad_length(k, keys),
            pad_length(v, keys),
            segment_ids=segments,
            causal=case.causal,
            sm_scale=case.scale,
            block_sizes=sizes,
        )
        return to_bhsd(case, out[:, :, : case.Sq])[0]

    return program("jax_flash", forward, case, which)
