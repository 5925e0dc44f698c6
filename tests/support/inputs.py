"""Seeded inputs for attention, as NumPy arrays."""

from __future__ import annotations

import dataclasses
import zlib

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Standard deviation of the logits: flat weighs all keys alike, sharp picks few, large saturates.
LOGITS = {"normal": 1.0, "flat": 0.01, "sharp": 6.0, "large": 40.0}


@dataclasses.dataclass(frozen=True)
class Sizes:
    B: int = 2
    Sq: int = 127
    Sk: int = 127
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.B, self.Hq, self.Sq, self.Sk

    def shape(self, name: str, layout: str) -> tuple[int, ...]:
        length, heads, dim = {
            "q": (self.Sq, self.Hq, self.D),
            "k": (self.Sk, self.Hkv, self.D),
            "v": (self.Sk, self.Hkv, self.Dv),
            "dout": (self.Sq, self.Hq, self.Dv),
        }[name]
        lead = (length, heads) if layout == "BSHD" else (heads, length)
        return (self.B, *lead, dim)


@dataclasses.dataclass
class Inputs:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray  # q's dtype
    dlse: np.ndarray  # float32 [B, Hq, Sq]


def normal(*shape: int, seed: int | str = 0, dtype: str = "float32") -> np.ndarray:
    if isinstance(seed, str):
        seed = zlib.crc32(seed.encode())
    return np.random.default_rng(seed).normal(size=shape).astype(DTYPES[dtype])


def draw(
    sizes: Sizes, *, seed: int = 0, dtype: str = "float32", layout="BSHD", logits="normal"
) -> Inputs:
    """q, k, v ~ N(0, 1), q scaled so that the logits have the spread that ``logits`` names."""
    arrays = {
        name: normal(*sizes.shape(name, layout), seed=f"{name}{seed}", dtype=dtype)
        for name in ("q", "k", "v", "dout")
    }
    arrays["q"] = (arrays["q"] * np.float32(LOGITS[logits])).astype(DTYPES[dtype])
    return Inputs(**arrays, dlse=normal(*sizes.scores[:3], seed=f"dlse{seed}"))
