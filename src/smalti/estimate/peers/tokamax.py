"""tokamax's splash attention (PyPI `tokamax`, in the extra `bench`), over its own tuner's choices.

Its kernel is a flat grid of the mask's live tiles. The module is private to tokamax and moves: it
was read in 0.0.12 (with jax 0.10) and 0.0.17 (with jax 0.12), which knows more switches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from itertools import product
from typing import Any

from smalti.estimate.errors import EstimateError
from smalti.estimate.peers.case import AttentionCase
from smalti.estimate.peers.kernels import (
    Tile,
    fitting,
    forward_of,
    lengths,
    mask_of,
    tiles,
)
from smalti.estimate.peers.passes import program
from smalti.estimate.peers.variant import Call, Variant

PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"
SOURCE = "the search space of tokamax 0.0.17's autotuner (splash_attention/pallas_mosaic_tpu.py)"
TILES = tiles(q=(1024, 2048), kv=(1024, 2048), compute=(512, 1024, 256))
# Of the eight orders of q, k and v that the tuner tries, the two that it most often found fastest.
K_LAYOUTS = ("SEQ_MINOR", "HEAD_DIM_MINOR")


def variants(case: AttentionCase, which: str) -> list[Variant]:
    """The search space's members that fit this case and that the installed tokamax knows.

    With a backward, the search is over its blocks, and the forward keeps the space's first.
    EstimateError: tokamax is not installed, or its splash attention is not where it was.
    """
    kernels = _module("splash_attention_kernel")
    switches = {field.name for field in dataclasses.fields(kernels.SplashConfig)}
    heads = "mha" if case.Hq == case.Hkv else "mqa"
    if which == "forward":
        options = [
            {**_forward(tile), "k_layout": layout, "use_experimental_scheduler": scheduler}
            for tile in fitting(case, TILES)
            for layout, scheduler in product(K_LAYOUTS, (True, False))
        ]
        if case.mask == "causal" and "qk_diag_skip" in switches:
            options += [
                {**_forward(tile), "qk_diag_skip": True, "sv_diag_skip": True, "qk_diag_grid": cut}
                for tile in fitting(case, TILES)
                for cut in (2, 4)
                if tile.q == tile.kv == tile.compute and case.Sq == case.Sk
            ]
    else:
        forward = fitting(case, TILES)[0]
        options = [
            {
                **_forward(forward),
                **_backward(tile),
                "k_layout": layout,
                "use_experimental_scheduler": True,
                "dq_reduction_steps": steps,
            }
            for tile in fitting(case, TILES, forward)
            for layout in K_LAYOUTS
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


def _forward(tile: Tile) -> dict[str, Any]:
    return {"block_q": tile.q, "block_kv": tile.kv, "block_kv_compute": tile.compute}


def _backward(tile: Tile) -> dict[str, Any]:
    return {
        "block_q_dkv": tile.q,
        "block_kv_dkv": tile.kv,
        "block_kv_dkv_compute": tile.compute,
    }


def _build(case: AttentionCase, which: str, config: dict[str, Any], heads: str) -> Call:
    kernels, masks = _module("splash_attention_kernel"), _module("splash_attention_mask")
    used = [Tile(config["block_q"], config["block_kv"], config["block_kv_compute"])]
    if "block_q_dkv" in config:
        names = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
        used.append(Tile(*(config[name] for name in names)))
    padded = lengths(case, *used)
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
        raise EstimateError('peer tokamax is not installed: pip install "smalti[bench]"')
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ImportError as error:
        raise EstimateError(
            f"peer tokamax: {PACKAGE}.{name} cannot be imported ({error}); it is private to "
            "tokamax, and was last read in tokamax 0.0.17"
        ) from error
