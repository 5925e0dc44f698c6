"""smalti's own TPU attention, as one more variant beside the peers'."""

from collections.abc import Mapping
from typing import Any

import jax

import smalti
from smalti.estimate.compile.target import find_target
from smalti.estimate.peers import AttentionCase, Variant
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call

OURS = "ours"


def our_variant(
    case: AttentionCase, which: str, chip: str, blocks: Mapping[str, int] | None = None
) -> Variant:
    """`smalti.attention(implementation="pallas")` with its own choice of blocks, or with these.

    Where smalti cannot do the case, its NotImplementedError comes when the function is traced.
    """
    return Variant(
        peer=OURS,
        blocks=blocks or {},
        source="smalti's own",
        build=lambda: _build(case, which, chip, blocks),
    )


def _build(case: AttentionCase, which: str, chip: str, blocks: Mapping[str, int] | None) -> Call:
    block_sizes = smalti.BlockSizes(**blocks) if blocks else None
    mask = smalti.masks.parse(case.mask)

    def forward(q, k, v) -> Any:
        return smalti.attention(
            *(q, k, v),
            mask=mask,
            scale=case.scale,
            layout=case.layout,
            implementation="pallas",
            block_sizes=block_sizes,
        )

    # A backward alone is traced once here, for its residuals, and must not see this CPU.
    with jax.sharding.use_abstract_mesh(find_target(chip).mesh()):
        return program("smalti", forward, case, which)
