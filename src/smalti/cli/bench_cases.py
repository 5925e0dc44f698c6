"""What `smalti estimate bench` compares: shapes, passes and chips, and variants of each peer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from smalti.cli.bench_variants import DIMS, published
from smalti.cli.ours import OURS, our_variant
from smalti.estimate.compile.target import find_target
from smalti.estimate.peers import AttentionCase, Variant, attention_variants

CHIPS = ("v5e", "v6e", "v7x")
LENGTHS = (2048, 4096, 8192)
HEADS = 8
KV_HEADS = (8, 2)
PASSES = ("forward", "both")
PEERS = ("tokamax", "splash", "jax_flash")

# Ours asks for up to 52 MiB of VMEM, what v7x, with 64 in all, can spare. The peers, which ask for
# nothing, get by a flag what they are quickest with: at 32 MiB their largest blocks compile, and
# more is no gift, for in the rest XLA keeps arrays between its operations and a kernel: with 48 and
# 60 MiB tokamax's forward on v7x at S=4096, D=128 takes 5 and 9 % longer, its q in HBM.
FLAGS = ("--xla_tpu_scoped_vmem_limit_kib=32768",)


@dataclass(frozen=True)
class Asked:
    """The command's options. Raises ValueError for what it cannot compare, with what it can."""

    chips: tuple[str, ...] = CHIPS
    dims: tuple[int, ...] = DIMS
    lengths: tuple[int, ...] = LENGTHS
    kv_heads: tuple[int, ...] = KV_HEADS
    passes: tuple[str, ...] = PASSES
    variants: int | None = None  # only so many of each peer
    full_grid: bool = False  # not the published choices but all of each peer's grid

    def __post_init__(self):
        for chip in self.chips:
            find_target(chip)
        _allowed("--passes", self.passes, PASSES)
        if not self.full_grid:
            _allowed("--dims", self.dims, DIMS, "; --full-grid takes any")
        _allowed("--kv-heads", self.kv_heads, [n for n in range(1, HEADS + 1) if HEADS % n == 0])
        for option, values in (
            *(("--dims", self.dims), ("--lengths", self.lengths)),
            ("--variants", () if self.variants is None else (self.variants,)),
        ):
            for value in values:
                if value < 1:
                    raise ValueError(f"{option}: {value} is less than 1")


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    chip: str
    which: str  # pass
    case: AttentionCase


@dataclass(frozen=True)
class Task:
    """One program to compile; `variant.peer` says whose."""

    shape: Shape
    variant: Variant


def shapes(asked: Asked) -> Iterator[Shape]:
    for chip in asked.chips:
        for which in asked.passes:
            for dim in asked.dims:
                for length in asked.lengths:
                    for heads in asked.kv_heads:
                        text = f"B=1,Hq={HEADS},Hkv={heads},S={length},D={dim}"
                        yield Shape(chip, which, AttentionCase.parse(text))


@cache
def tasks(asked: Asked) -> Sequence[Task]:
    """All of them; those of one shape stand together, ours first.

    EstimateError: a peer is not installed. Without one of them there is no best peer.
    """
    found = []
    for shape in shapes(asked):
        variants = [our_variant(shape.case, shape.which, shape.chip)]
        for peer in PEERS:
            variants += _variants(asked, peer, shape)[: asked.variants]
        found += [Task(shape, replace(variant, flags=FLAGS)) for variant in variants]
    return tuple(found)


def _variants(asked: Asked, peer: str, shape: Shape) -> list[Variant]:
    grid = attention_variants(peer, shape.case, shape.which)
    return grid if asked.full_grid else published(peer, shape.case, shape.which)


def _allowed(option: str, got: Sequence, allowed: Sequence, hint: str = "") -> None:
    for value in got:
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ValueError(f"{option}: {value} is none of {names}{hint}")


__all__ = ["OURS", "PEERS", "Asked", "Shape", "Task", "shapes", "tasks"]
