"""What is measured: shapes, masks, dtypes, passes, and the ratios the project set out to reach."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

B, H, D = 1, 8, 64
WINDOW = 512
SINK_TOKENS = 4
# Lengths of the eight documents, in sixteenths of the sequence.
DOCUMENTS = (1, 3, 2, 2, 1, 2, 3, 2)

OURS = "smalti"
PEERS = ("jax.nn", "plain", "torch.sdpa", "torch.flex")


@dataclass(frozen=True)
class Case:
    """One mask at one length, dtype and pass, beside `peers`.

    `bars` maps a peer to the least ratio of its time to ours that the project asks for. `left_out`
    maps a peer that is not run to the reason, which the report prints.
    """

    mask: str  # "causal", "window", "streaming", "documents", "documents-known"
    S: int
    dtype: str = "float32"
    backward: bool = False
    peers: tuple[str, ...] = PEERS
    bars: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16"}[self.dtype]
        return f"{self.mask}/{short}/{self.S}/{'fwd+bwd' if self.backward else 'fwd'}"


FORWARD_ONLY = "flex_attention has no backward on a CPU"
JAX_NN_SLOWER = "beside plain it is the slower of the two, and takes 3 GB"
TOO_LARGE = "its S×S scores do not fit: {gib:.0f} GiB for one copy, and the backward keeps several"


def _backward(mask: str, S: int, dtype: str = "float32", **bars: float) -> Case:
    """Forward and backward; peers that would hold S×S scores only at lengths where they fit."""
    left_out = {"jax.nn": JAX_NN_SLOWER, "torch.flex": FORWARD_ONLY}
    peers = ("plain", "torch.sdpa")
    if S > 4096:
        large = TOO_LARGE.format(gib=B * H * S * S * 4 / 2**30)
        left_out |= {"jax.nn": large, "plain": large}
        peers = ("torch.sdpa",)
    named = {name.replace("_", "."): bar for name, bar in bars.items()}
    return Case(mask, S, dtype, True, peers, named, left_out)


def all_cases() -> list[Case]:
    banded = {"torch.sdpa": 2.0}
    return [
        Case("causal", 4096, bars={"jax.nn": 3.0}),
        Case("causal", 4096, "bfloat16", bars={"jax.nn": 5.0}),
        Case("window", 4096, bars={"jax.nn": 10.0} | banded),
        Case("window", 4096, "bfloat16", bars={"jax.nn": 10.0}),
        Case("streaming", 4096, bars=banded),
        Case("documents", 4096, bars=banded),
        Case("documents-known", 4096, bars=banded),
        _backward("causal", 4096, plain=3.0),
        _backward("causal", 4096, "bfloat16", plain=3.0),
        _backward("window", 4096, plain=3.0, torch_sdpa=2.0),
        _backward("streaming", 4096, plain=3.0, torch_sdpa=2.0),
        _backward("documents", 4096, plain=3.0, torch_sdpa=2.0),
        _backward("causal", 8192),
        _backward("causal", 16384),
    ]


# The growth of a fresh process over one forward and backward, and the most it may be.
MEMORY_CASE = Case("causal", 16384, backward=True, peers=("torch.sdpa",))
MEMORY_BAR_MIB = 600.0


def quick(case: Case) -> Case:
    """The same case at an eighth of the length: shows that the harness runs. No bar applies."""
    if case.backward:
        return _backward(case.mask, case.S // 8, case.dtype)
    return replace(case, S=case.S // 8, bars={})


def visible(mask: str, i, j, ids):
    """Which query i sees which key j, elementwise, on arrays of NumPy, JAX or PyTorch alike.

    Written out here rather than taken from smalti, whose masks are what is measured.
    """
    causal = j <= i
    if mask == "causal":
        return causal
    if mask == "window":
        return causal & (i - j < WINDOW)
    if mask == "streaming":
        return causal & ((j < SINK_TOKENS) | (i - j < WINDOW))
    if mask in ("documents", "documents-known"):
        return causal & (ids[i] == ids[j])
    raise ValueError(f"mask is {mask!r}; the benchmark knows causal, window, streaming, documents")


@dataclass(frozen=True)
class Inputs:
    """float32 NumPy arrays `[B, S, H, D]`, and the document of each position, `[S]` int32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    ids: np.ndarray


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((B, case.S, H, D), dtype=np.float32) for _ in range(4))
    ends = np.cumsum(DOCUMENTS) * case.S // sum(DOCUMENTS)
    ids = np.searchsorted(ends, np.arange(case.S), side="right").astype(np.int32)
    return Inputs(q, k, v, dout, ids)
