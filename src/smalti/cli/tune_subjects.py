"""What `smalti estimate tune` can search: kernels with a grid of blocks.

A subject is one function, from what was asked to a `Grid`.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.block_table import ShapeClass, attention_class, matmul_class
from smalti.cli.ours import OURS, our_variant
from smalti.estimate.peers import (
    PASSES,
    AttentionCase,
    Variant,
    attention_variants,
    matmul_variant,
)
from smalti.estimate.peers.arrays import clip
from smalti.estimate.peers.case import known


@dataclass(frozen=True)
class Asked:
    """The command's options, as they were given; None where they were not."""

    shape: str
    chip: str = "v6e"
    which: str | None = None
    mask: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Grid:
    """The candidates, the most promising first, and which shapes their best one serves."""

    variants: Sequence[Variant]
    shape_class: ShapeClass
    searched: Mapping[str, Any]  # the shape itself and all else that was asked, JSON values
    options: tuple[str, ...]  # the same on the command line, defaults too


def grid_of(subject: str, asked: Asked) -> Grid:
    """Raises ValueError for an unknown subject and what the subject cannot make sense of."""
    known("SUBJECT", subject, SUBJECTS, noun="subject")
    return SUBJECTS[subject](asked)


def _attention(
    variants: Callable[[AttentionCase, str, str], Sequence[Variant]],
) -> Callable[[Asked], Grid]:
    """variants: from case, pass and chip."""

    def grid(asked: Asked) -> Grid:
        which, mask = asked.which or "forward", asked.mask or "causal"
        known("--pass", which, PASSES, noun="pass")
        case = AttentionCase.parse(asked.shape, mask=mask, dtype=asked.dtype or "bfloat16")
        sizes = {"B": case.B, "Hq": case.Hq, "Hkv": case.Hkv, "Sq": case.Sq, "Sk": case.Sk}
        sizes |= {"D": case.D, "Dv": case.value_dim}
        per_head = {key: size for key, size in sizes.items() if key != "B"}
        return Grid(
            variants=variants(case, which, asked.chip),
            shape_class=attention_class(which=which, dtype=case.dtype, mask=mask, **per_head),
            searched={**sizes, "dtype": case.dtype, "mask": mask, "pass": which},
            options=(
                *("--shape", _spelled(sizes), "--pass", which),
                *("--mask", mask, "--dtype", case.dtype),
            ),
        )

    return grid


def _of_peer(peer: str) -> Callable[[AttentionCase, str, str], Sequence[Variant]]:
    return lambda case, which, chip: attention_variants(peer, case, which)


def _by_promise(sides: Mapping[str, Iterable[int]]) -> list[dict[str, int]]:
    """All combinations of sides, each in the order of promise; none of them twice."""
    distinct = {name: tuple(dict.fromkeys(side)) for name, side in sides.items()}
    places = itertools.product(*(range(len(side)) for side in distinct.values()))
    return [
        {name: side[at] for (name, side), at in zip(distinct.items(), place, strict=True)}
        for place in sorted(places, key=sum)
    ]


# block_q, block_kv of ours, the most promising first.
_TILES = ((512, 1024), (512, 512), (256, 1024), (256, 512))


def _ours(case: AttentionCase, which: str, chip: str) -> Sequence[Variant]:
    if which == "both":
        raise ValueError("--pass both: ours has blocks for forward and for backward; tune each")
    tiles = dict.fromkeys((clip(q, case.Sq), clip(kv, case.Sk)) for q, kv in _TILES)
    return [our_variant(case, which, chip, {"block_q": q, "block_kv": kv}) for q, kv in tiles]


# A tall and wide result reads its operands less often, and a long step has fewer beginnings, until
# VMEM is full.
_SIDES = {"bm": (1024, 512, 2048, 256), "bk": (512, 1024, 2048, 256), "bn": (1024, 512, 2048, 256)}


def _matmul(asked: Asked) -> Grid:
    for option, given in (("--pass", asked.which), ("--mask", asked.mask)):
        if given is not None:
            raise ValueError(f"{option}: matmul has none; leave it out")
    dtype = asked.dtype or "bfloat16"
    known("--dtype", dtype, ("bfloat16",), noun="dtype of matmul")
    match = re.fullmatch(r"M=(\d+),K=(\d+),N=(\d+)", asked.shape.replace(" ", ""))
    if match is None or "0" in match.groups():
        raise ValueError(f"--shape {asked.shape!r}: matmul's is M=1024,K=1024,N=1024")
    m, k, n = map(int, match.groups())
    sizes = {"M": m, "K": k, "N": n}
    sides = {
        block: _dividing(size, _SIDES[block])
        for block, size in zip(_SIDES, sizes.values(), strict=True)
    }
    return Grid(
        variants=[matmul_variant(m, k, n, **blocks) for blocks in _by_promise(sides)],
        shape_class=matmul_class(dtype=dtype, **sizes),
        searched={**sizes, "dtype": dtype},
        options=("--shape", _spelled(sizes), "--dtype", dtype),
    )


def _dividing(size: int, sides: Sequence[int]) -> list[int]:
    return [side for side in sides if size % side == 0] or [size]


def _spelled(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{key}={size}" for key, size in sizes.items())


SUBJECTS: dict[str, Callable[[Asked], Grid]] = {
    OURS: _attention(_ours),
    **{peer: _attention(_of_peer(peer)) for peer in ("splash", "tokamax", "jax_flash")},
    "matmul": _matmul,
}
