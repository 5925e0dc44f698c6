"""tokamax's splash attention (PyPI `tokamax`, in the extra `bench`), with its own tuner's choices.

Its kernel is a flat grid of the mask's live tiles. The module is private to tokamax and moves: it
was read in 0.0.12 (with jax 0.10) and 0.0.17 (with jax 0.12), which knows more switches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from smalti.estimate.errors import EstimateError
from smalti.estimate.peers.arrays import LANES
from smalti.estimate.peers.case import AttentionCase
from smalti.estimate.peers.kernels import Tile, fitting, forward_of, lengths, mask_of
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call, Variant

PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"
SOURCE = "tokamax 0.0.17, data/autotuning/tpu*/pallas_mosaic_tpu_{splash,flash}_attention*.json"

# Those tables hold, for some hundred shapes on v5p, v6e and v7x, what tokamax's own tuner measured
# to be fastest. A choice is here if it was for at least four shapes (backward: for one) of 1,024
# tokens and more; the most frequent first, but for the first two: 2,048 leaves a causal mask of
# 2,048 tokens nothing to skip. Left out is 4096/4096/256, the best of 10 shapes on v7x: it compiles
# for up to six minutes. `variant` can name it. The flag is use_experimental_scheduler.
FORWARD = (
    (Tile(1024, 1024, 512), True),
    (Tile(2048, 2048, 512), True),
    (Tile(1024, 1024, 256), False),
    (Tile(1024, 1024, 512), False),
    (Tile(1024, 1024, 1024), False),
    (Tile(2048, 2048, 1024), False),
    (Tile(2048, 2048, 256), False),
    (Tile(1024, 1024, 1024), True),
    (Tile(1024, 1024, 256), True),
    (Tile(1024, 4096, 256), False),
)
BACKWARD = (
    Tile(2048, 2048, 512),
    Tile(1024, 1024, 1024),
    Tile(1024, 1024, 512),
    Tile(1024, 4096, 512),
    Tile(2048, 4096, 512),
    Tile(2048, 1024, 1024),
    Tile(1024, 2048, 512),
    Tile(2048, 2048, 256),
)
# The minor axis of q, k and v; all three along the sequence won only where D is no whole lanes.
_HEAD, _SEQ = "HEAD_DIM_MINOR", "SEQ_MINOR"
LAYOUTS = ((_HEAD, _HEAD, _HEAD), (_HEAD, _SEQ, _HEAD), (_SEQ, _HEAD, _HEAD))
NARROW_LAYOUT = (_SEQ, _SEQ, _SEQ)
FORWARD_NAMES = ("block_q", "block_kv", "block_kv_compute")
BACKWARD_NAMES = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")


def variants(case: AttentionCase, which: str) -> list[Variant]:
    """The choices above that fit this case, and those that only the installed tokamax knows.

    With a backward, the choices are its blocks, and the forward keeps its first.

    EstimateError: tokamax is not installed, or its splash attention is not where it was.
    """
    switches = {
        field.name for field in dataclasses.fields(_module("splash_attention_kernel").SplashConfig)
    }
    heads = "mha" if case.Hq == case.Hkv else "mqa"
    if which == "forward":
        options = _forward_options(case)
        if "qk_diag_skip" in switches and case.mask == "causal" and case.Sq == case.Sk:
            options += _diagonal_options(case)
    else:
        forward = _forward_options(case)[0]
        first = Tile(*(forward[name] for name in FORWARD_NAMES))
        options = [
            {**forward, **dict(zip(BACKWARD_NAMES, tile, strict=True)), "dq_reduction_steps": steps}
            for tile in fitting(case, BACKWARD, first)
            for steps in ((3, None) if case.Sk > 3 * tile.kv else (None,))
        ]
    return [variant(case, which, config, heads, SOURCE) for config in options]


def variant(
    case: AttentionCase, which: str, config: dict[str, Any], heads: str, source: str
) -> Variant:
    """One choice: `config` holds SplashConfig's own arguments (layouts by name).

    heads: "mqa" maps a kernel of one key head over key heads, "mha" leaves them to the kernel.
    """
    return Variant(
        peer="tokamax",
        blocks={**config, "heads": heads},
        source=source,
        build=lambda: _build(case, which, config, heads),
    )


def _forward_options(case: AttentionCase) -> list[dict[str, Any]]:
    layouts = LAYOUTS if case.D % LANES == 0 else (NARROW_LAYOUT, *LAYOUTS)
    tiles = fitting(case, tuple(tile for tile, _ in FORWARD))
    found = dict.fromkeys(  # short sequences make one of several
        (tile, scheduler)
        for tile in tiles
        for wanted, scheduler in FORWARD
        if wanted.clipped(case) == tile
    )
    return [
        {
            **dict(zip(FORWARD_NAMES, tile, strict=True)),
            **dict(zip(("q_layout", "k_layout", "v_layout"), layout, strict=True)),
            "use_experimental_scheduler": scheduler,
        }
        for tile, scheduler in found
        for layout in layouts
    ]


def _diagonal_options(case: AttentionCase) -> list[dict[str, Any]]:
    """Products that leave out the corner above the diagonal: square tiles of one strip only."""
    return [
        {
            **dict(zip(FORWARD_NAMES, tile, strict=True)),
            "qk_diag_skip": True,
            "sv_diag_skip": True,
            "qk_diag_grid": parts,
        }
        for tile in fitting(case, (Tile(1024, 1024, 1024),))
        for parts in (2, 4)
    ]


def _build(case: AttentionCase, which: str, config: dict[str, Any], heads: str) -> Call:
    kernels, masks = _module("splash_attention_kernel"), _module("splash_attention_mask")
    used = [FORWARD_NAMES, BACKWARD_NAMES] if "block_q_dkv" in config else [FORWARD_NAMES]
    padded = lengths(case, *(Tile(*(config[name] for name in names)) for names in used))
    if padded is None:
        raise ValueError(f"tokamax: the blocks {config} do not divide one another")
    arguments = {
        name: kernels.QKVLayout[value] if name.endswith("_layout") else value
        for name, value in config.items()
    }
    make = kernels.make_splash_mqa if heads == "mqa" else kernels.make_splash_mha
    kernel = make(
        mask_of(case, padded, masks), config=kernels.SplashConfig(**arguments), q_seq_shards=1
    )
    forward = forward_of(case, padded, kernel, kernels.SegmentIds, heads)
    return program("tokamax", forward, case, which)


def _module(name: str) -> Any:
    if importlib.util.find_spec("tokamax") is None:
        raise EstimateError("peer tokamax is not installed: pip install tokamax")
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ImportError as error:
        raise EstimateError(
            f"peer tokamax: {PACKAGE}.{name} cannot be imported ({error}); it is private to "
            "tokamax, and was last read in tokamax 0.0.17"
        ) from error
