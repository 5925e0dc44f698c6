"""jax.experimental.pallas.ops.tpu.splash_attention over a grid of blocks, both of its backwards."""

from __future__ import annotations

from typing import Any

from smalti.estimate.peers.case import AttentionCase
from smalti.estimate.peers.kernels import Tile, fitting, forward_of, lengths, mask_of, tiles
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call, Variant

FORWARD = tiles(q=(1024, 2048, 512), kv=(1024, 2048, 512), compute=(512, 1024, 256))
BACKWARD = tiles(q=(1024, 512, 2048), kv=(1024, 2048, 512), compute=(512, 1024, 256))


def variants(case: AttentionCase, which: str) -> list[Variant]:
    """The grid's members that fit this case; with a backward, each fused and unfused.

    With a backward, the search is over its blocks, and the forward keeps the grid's first.
    """
    if which == "forward":
        return [variant(case, which, tile) for tile in fitting(case, FORWARD)]
    forward = fitting(case, FORWARD)[0]
    return [
        variant(case, which, forward, tile, fused)
        for tile in fitting(case, BACKWARD, forward)
        for fused in (True, False)
    ]


def variant(
    case: AttentionCase,
    which: str,
    forward: Tile,
    backward: Tile | None = None,
    fused: bool = True,
    source: str = "smalti's grid",
) -> Variant:
    """One choice; a pass with a backward needs the backward's tile."""
    blocks: dict[str, Any] = {
        "block_q": forward.q,
        "block_kv": forward.kv,
        "block_kv_compute": forward.compute,
    }
    if backward is not None:
        blocks |= {
            "block_q_dkv": backward.q,
            "block_kv_dkv": backward.kv,
            "block_kv_dkv_compute": backward.compute,
            "use_fused_bwd_kernel": fused,
        }
        if not fused:
            blocks |= {"block_q_dq": backward.q, "block_kv_dq": backward.kv}
    used = (forward,) if backward is None else (forward, backward)
    return Variant("splash", blocks, source, lambda: _build(case, which, blocks, used))


def _build(case: AttentionCase, which: str, blocks: dict[str, Any], used: tuple[Tile, ...]) -> Call:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    padded = lengths(case, *used)
    assert padded is not None
    grouped = case.Hq != case.Hkv
    make = library.make_splash_mqa if grouped else library.make_splash_mha
    heads = case.Hq // case.Hkv if grouped else case.Hq
    kernel = make(
        masks.MultiHeadMask([mask_of(case, padded, masks)] * heads),
        block_sizes=library.BlockSizes(**blocks),
        head_shards=1,
        q_seq_shards=1,
    )
    forward = forward_of(
        case, padded, kernel, library.SegmentIds, heads="mqa" if grouped else "mha"
    )
    return program("splash", forward, case, which)
