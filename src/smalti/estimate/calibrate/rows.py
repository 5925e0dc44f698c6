"""Published measurements, and the programs that they measured."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from smalti.estimate.peers import (
    AttentionCase,
    Variant,
    attention_variants,
    matmul_variant,
    tokamax,
    xla_matmul_variant,
)

# published.json: gathered from papers, docs and recipes. tuned.json: what tokamax's tuner measured.
FILES = ("published", "tuned")
# How many of tokamax's own tuned choices are tried where "best-tuned blocks" were published.
CHOICES = 4


@dataclass(frozen=True)
class Row:
    """One measurement, as it was published."""

    id: str
    chip: str
    kernel: str
    shape: str
    seconds: float
    includes_dispatch: bool  # timed from the host
    source: str
    file: str  # of FILES
    blocks: tuple[int, ...] = ()
    mask: str = "causal"
    layout: str = "BHSD"
    config: dict[str, Any] = field(default_factory=dict, hash=False)  # of tokamax's splash

    @property
    def names_a_kernel(self) -> bool:
        """One kernel or product, and not a training step of a batch that is not published."""
        return not self.kernel.startswith("training step")

    @property
    def which(self) -> str:
        """The pass, of attention."""
        return (
            "backward" if self.kernel.endswith("backward") or " bwd" in self.kernel else "forward"
        )

    def candidates(self) -> list[Variant]:
        """What may have been run: one program, or those among which the best was published.

        Raises EstimateError where a peer is not installed.
        """
        if self.kernel == "pallas matmul tutorial":
            bm, bk, bn = self.blocks
            return [matmul_variant(*_sizes(self.shape), bm=bm, bk=bk, bn=bn)]
        if self.kernel == "xla matmul":
            return [xla_matmul_variant(*_sizes(self.shape))]
        if self.kernel.startswith("splash causal"):
            return list(self._best_tuned())
        if self.kernel.startswith("tokamax splash"):
            case = AttentionCase.parse(self.shape, mask=self.mask, layout=self.layout)
            heads = "mha" if case.Hq == case.Hkv else "mqa"
            return [tokamax.variant(case, self.which, self.config, heads, self.source)]
        raise ValueError(f"row {self.id}: the kernel {self.kernel!r} is not one of the peers")

    def _best_tuned(self) -> Iterator[Variant]:
        """tokamax's splash, whose benchmark it is, without a change of layout around the kernel."""
        numbers = ("".join(filter(str.isdecimal, word)) for word in self.shape.split()[:-1])
        sizes = zip(("B", "Hq", "Hkv", "S", "D"), numbers, strict=True)
        case = AttentionCase.parse(",".join(f"{key}={number}" for key, number in sizes))
        plain = (
            variant
            for variant in attention_variants("tokamax", case, self.which)
            if {v for k, v in variant.blocks.items() if k.endswith("_layout")} <= {"HEAD_DIM_MINOR"}
        )
        return itertools.islice(plain, CHOICES)


def _sizes(shape: str) -> list[int]:
    """ "4096x4096x4096 bf16" → the three sizes."""
    return [int(size) for size in shape.split()[0].split("x")]


@cache
def published() -> tuple[Row, ...]:
    """All rows, those of published.json first."""
    rows = []
    for file in FILES:
        text = Path(__file__).with_name(f"{file}.json").read_text(encoding="utf-8")
        for row in json.loads(text)["rows"]:
            rows.append(Row(**{**row, "file": file, "blocks": tuple(row.get("blocks", ()))}))
    return tuple(rows)
