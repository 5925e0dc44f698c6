"""The peers' variants of `smalti estimate bench`: few, for its 744 programs take an hour and more.

They come from a pilot by `smalti.estimate` (jax 0.10.2, libtpu 0.0.42.1, tokamax 0.0.12) at Hkv=8
with 32 MiB of scoped VMEM: on v6e at S=4096 all three head dims, on v7x and v5e D=128, forward and
both. Kept is what won somewhere or came within 2 % of it, and little else. What lost, on v6e at
D=128, in times of the peer's best:

- tokamax forward: 2048/2048/512 1.14 (at S=8192 1.06), 512/1024/512 and 1024/512/512 1.15 and 1.17,
  512/512/512 at S=2048 1.09, 1024/1024/256 1.11; backward: 2048/1024/1024 1.10.
- splash forward: 1024/2048/… 1.10 (at S=8192 1.02), 512/1024/512 1.10, 2048/…/512 1.13 to 1.16;
  backward: not fused 1.27 (v7x), 1024/2048/1024 1.06, 512/1024/1024 1.03.
- jax_flash: 1024/1024/512 1.02 (both) to 1.10 (D=256, forward), 512/1024/512 1.21; both of them are
  far behind the best peer.

Not in the pilot: head dims 64 and 256 on v7x and v5e, Hkv=2 but for the grouping of heads, and on
v6e tokamax's backward at D=256 with 1024/1024/1024 in three steps, which compiled for too long.
Blocks of 2048 keys compile for minutes. `--full-grid` tries all that a peer's own grid has.
"""

from smalti.estimate.peers import AttentionCase, Variant, flash, splash, tokamax
from smalti.estimate.peers.kernels import Tile

SOURCE = "smalti's pilot: cli/bench_variants.py"
DIMS = (64, 128, 256)

_MINOR = {"H": "HEAD_DIM_MINOR", "S": "SEQ_MINOR"}
_HALF, _SQUARE = (1024, 1024, 512), (1024, 1024, 1024)  # block_q, block_kv, block_kv_compute

# With use_experimental_scheduler, quicker but on v5e, and the minor axes of q, k and v.
TOKAMAX = {
    64: ((_HALF, True, "SSS"), (_HALF, True, "HHH"), (_HALF, False, "HHH")),
    128: ((_HALF, True, "HHH"), (_HALF, False, "HHH"), (_HALF, True, "HSH")),
    256: ((_HALF, True, "HHH"), (_HALF, False, "HHH"), (_SQUARE, False, "HHH")),
}
# Which of those is the forward, and the backward's tile and dq_reduction_steps.
TOKAMAX_BACKWARD = {
    64: ((0, _SQUARE, None), (0, _SQUARE, 3), (2, _SQUARE, None)),
    128: ((0, _SQUARE, 3), (1, _SQUARE, 3), (0, _SQUARE, None)),
    256: ((0, _HALF, 3), (1, _HALF, 3), (0, _SQUARE, 3)),
}
SPLASH = {64: (_HALF, _SQUARE), 128: (_HALF, _SQUARE), 256: (_SQUARE, _HALF)}
SPLASH_BACKWARD = (_SQUARE, _HALF)  # fused; its forward is the first above
FLASH = (_SQUARE,)  # block_q, block_k_major, block_k of all its kernels


def published(peer: str, case: AttentionCase, which: str) -> list[Variant]:
    """The peer's variants of a case whose D is one of DIMS, the most promising first."""
    found = _PEERS[peer](case, which)
    return list({variant.name: variant for variant in found}.values())  # clipped ones may be equal


def _tokamax(case: AttentionCase, which: str) -> list[Variant]:
    def forward(tile: tuple[int, int, int], scheduler: bool, minor: str) -> dict:
        layouts = zip(("q_layout", "k_layout", "v_layout"), minor, strict=True)
        return {
            **_named(tokamax.FORWARD_NAMES, tile, case),
            **{name: _MINOR[axis] for name, axis in layouts},
            "use_experimental_scheduler": scheduler,
        }

    choices = TOKAMAX[case.D]
    if which == "forward":
        configs = [forward(*choice) for choice in choices]
    else:
        configs = [
            {
                **forward(*choices[first]),
                **_named(tokamax.BACKWARD_NAMES, tile, case),
                # Its sum in place is for more key tiles than it has steps.
                "dq_reduction_steps": steps if steps and case.Sk > steps * tile[1] else None,
            }
            for first, tile, steps in TOKAMAX_BACKWARD[case.D]
        ]
    # Its own grouping of heads, which for Hkv=2 is 0.2 % quicker than a map over key heads.
    return [tokamax.variant(case, which, config, "mha", SOURCE) for config in configs]


def _splash(case: AttentionCase, which: str) -> list[Variant]:
    tiles = [Tile(*tile).clipped(case) for tile in SPLASH[case.D]]
    if which == "forward":
        return [splash.variant(case, which, tile, source=SOURCE) for tile in tiles]
    return [
        splash.variant(case, which, tiles[0], Tile(*tile).clipped(case), source=SOURCE)
        for tile in SPLASH_BACKWARD
    ]


def _flash(case: AttentionCase, which: str) -> list[Variant]:
    return [
        flash.variant(case, which, flash.Blocks(*Tile(*blocks).clipped(case)), SOURCE)
        for blocks in FLASH
    ]


def _named(names: tuple[str, ...], tile: tuple[int, int, int], case: AttentionCase) -> dict:
    return dict(zip(names, Tile(*tile).clipped(case), strict=True))


_PEERS = {"tokamax": _tokamax, "splash": _splash, "jax_flash": _flash}
