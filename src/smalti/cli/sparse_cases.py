"""What `smalti estimate sparse` compares: masks, chips, passes, and who has the mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import smalti
from smalti.cli.bench_cases import FLAGS, OURS
from smalti.cli.bench_variants import published
from smalti.cli.ours import our_variant
from smalti.estimate.compile.target import find_target
from smalti.estimate.peers import AttentionCase, Variant
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call

CHIPS = ("v5e", "v6e", "v7x")
PASSES = ("forward", "both")
HEADS, DIM = 8, 128
# Masks as `smalti.masks.parse` reads them.
DENSE = "causal()"
DOCUMENTS = "document(lengths=[1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024])"
MASKS = (  # (S, mask)
    (8192, DENSE),
    (8192, "sliding_window(512)"),
    (8192, "streaming(sinks=4, window=512)"),
    (8192, f"{DOCUMENTS} & causal()"),
    (8192, DOCUMENTS),
    (2048, DENSE),
    (2048, "sliding_window(512)"),
    (2048, "streaming(sinks=4, window=512)"),
)
TILE_NAMES = ("block_q", "block_kv", "block_kv_compute")
SPLASH_TILES = ((1024, 1024, 512), (512, 512, 512))  # block_q, block_kv, block_kv_compute


@dataclass(frozen=True)
class Asked:
    """The command's options. Raises ValueError for a chip that is not known."""

    chips: tuple[str, ...] = CHIPS
    xla: bool = True

    def __post_init__(self):
        for chip in self.chips:
            find_target(chip)


@dataclass(frozen=True)
class Row:
    chip: str
    length: int
    mask: str
    which: str  # pass

    @property
    def case(self) -> AttentionCase:
        """Its shapes; the mask is beside it."""
        return AttentionCase(1, HEADS, HEADS, self.length, self.length, DIM)


@dataclass(frozen=True)
class Task:
    """One program to compile; `variant.peer` says whose."""

    row: Row
    variant: Variant


def rows(asked: Asked) -> list[Row]:
    return [
        Row(chip, length, mask, which)
        for chip in asked.chips
        for length, mask in MASKS
        for which in PASSES
    ]


@cache
def tasks(asked: Asked) -> Sequence[Task]:
    """All of them, ours first for each row."""
    return tuple(
        Task(row, replace(variant, flags=FLAGS))
        for row in rows(asked)
        for variant in _of(row, asked)
    )


def _of(row: Row, asked: Asked) -> list[Variant]:
    case, which = row.case, row.which
    if row.mask == DENSE:
        found = [our_variant(case, which, row.chip)]
        return found + [
            v for peer in ("tokamax", "splash") for v in published(peer, case, which)[:2]
        ]
    mask = smalti.masks.parse(row.mask)
    found = [_variant(OURS, {}, row, partial(_ours, mask))]
    for tile in SPLASH_TILES:
        blocks: dict[str, int] = dict(zip(TILE_NAMES, tile, strict=True))
        found.append(
            _variant("splash", blocks, row, partial(_splash, row.mask, row.length, blocks))
        )
    if asked.xla:
        found.append(_variant("xla", {}, row, partial(_masked_softmax, mask)))
    return found


def _variant(peer: str, blocks: dict[str, Any], row: Row, make: Callable[[], Any]) -> Variant:
    def build() -> Call:
        if peer != OURS:  # splash puts its tables on a device, which no mesh of a TPU has here
            return program(peer, make(), row.case, row.which)
        with jax.sharding.use_abstract_mesh(find_target(row.chip).mesh()):
            return program("smalti", make(), row.case, row.which)

    return Variant(peer=peer, blocks=blocks, source="cli/sparse_cases.py", build=build)


def _ours(mask):
    return partial(smalti.attention, mask=mask, layout="BHSD", implementation="pallas")


def _splash(text: str, length: int, blocks: dict[str, int]):
    """Its own window mask; of the others the pairs themselves, which its tables then hold."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = length, length
    if text == "sliding_window(512)":
        mask = masks.LocalMask(shape, (511, 0), 0)
    else:
        index = np.arange(length, dtype=np.int32)
        bound = smalti.masks.parse(text).bind(1, 1, *shape)
        mask = masks.NumpyMask(np.asarray(bound(0, 0, index[:, None], index[None, :])))
    tile = blocks["block_q"], blocks["block_kv"], blocks["block_kv_compute"]
    names = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    kernel = library.make_splash_mha(
        masks.MultiHeadMask([mask] * HEADS),
        block_sizes=library.BlockSizes(
            **blocks, **dict(zip(names, tile, strict=True)), use_fused_bwd_kernel=True
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    return lambda q, k, v: jax.vmap(kernel)(q * q.shape[-1] ** -0.5, k, v)  # it does not scale


def _masked_softmax(mask):
    """Attention as the article compares with: compute all scores, then mask them."""

    def attend(q, k, v):
        index = jnp.arange(q.shape[2])
        visible = mask.bind(1, 1, len(index), len(index))(0, 0, index[:, None], index[None, :])
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf))
        return jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v)

    return attend
