"""The attention that is timed: shapes, mask and layout, as the command line says them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

KEYS = ("B", "Hq", "Hkv", "S", "Sq", "Sk", "D", "Dv")
MASKS = ("causal", "full", "sliding_window(n)")
DTYPES = ("bfloat16", "float32")
LAYOUTS = ("BHSD", "BSHD")


@dataclass(frozen=True)
class AttentionCase:
    """One attention: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; scale 1/sqrt(D).

    `layout` "BSHD" swaps the axes H and S of all four arrays. `mask` is "causal", "full" or
    "sliding_window(n)" (exactly n keys); in the causal ones the last query meets the last key:
    query i sees keys j ≤ i + Sk − Sq. `Dv` None means D.

    Raises ValueError for a size below 1, Hq that is not a multiple of Hkv, and a mask, dtype or
    layout that is not known.

    >>> AttentionCase.parse("B=1,Hq=8,Hkv=2,S=4096,D=128").Sk
    4096
    """

    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int | None = None
    dtype: str = "bfloat16"
    mask: str = "causal"
    layout: str = "BHSD"

    def __post_init__(self):
        for key in ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv"):
            size = getattr(self, key)
            if size is not None and size < 1:
                raise ValueError(f"{key}={size}: a size is at least 1")
        if self.Hq % self.Hkv:
            raise ValueError(
                f"Hq={self.Hq} is not a multiple of Hkv={self.Hkv}: every key head serves the "
                "same number of query heads"
            )
        known("dtype", self.dtype, DTYPES)
        known("layout", self.layout, LAYOUTS)
        if re.fullmatch(r"sliding_window\(0*[1-9]\d*\)", self.mask) is None:
            known("mask", self.mask, MASKS[:2], shown=MASKS)
        if self.causal and self.Sq > self.Sk:
            raise ValueError(
                f"mask={self.mask!r} with Sq={self.Sq} > Sk={self.Sk} leaves the first queries "
                'without a key; give Sk ≥ Sq, or mask="full"'
            )

    @classmethod
    def parse(cls, shape: str, **others: str) -> AttentionCase:
        """Reads "B=1,Hq=8,Hkv=8,S=4096,D=128"; S is Sq and Sk at once, and Dv may be added.

        Raises ValueError for a key that is unknown, given twice or missing, and for a value that
        is not a whole number. `others` are mask, dtype and layout.
        """
        sizes: dict[str, int] = {}
        for item in shape.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise ValueError(f"shape: {item.strip()!r} is not key=number, as in S=4096")
            known("shape", key, KEYS, noun="key")
            if key in sizes:
                raise ValueError(f"shape: {key} is given twice")
            if re.fullmatch(r"-?\d+", value) is None:
                raise ValueError(f"shape: {key}={value!r} is not a whole number")
            sizes[key] = int(value)
        if "S" in sizes:
            both = [key for key in ("Sq", "Sk") if key in sizes]
            if both:
                raise ValueError(f"shape: S is Sq and Sk; drop S, or drop {' and '.join(both)}")
            sizes["Sq"] = sizes["Sk"] = sizes.pop("S")
        missing = [key for key in ("B", "Hq", "Hkv", "Sq", "Sk", "D") if key not in sizes]
        if missing:
            hint = " (S=… gives Sq and Sk)" if {"Sq", "Sk"} & set(missing) else ""
            raise ValueError(f"shape: {', '.join(missing)} missing{hint}; got {shape!r}")
        return cls(**sizes, **others)  # pyright: ignore[reportArgumentType]

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def window(self) -> int | None:
        """How many keys a query sees at most; None: no limit."""
        match = re.fullmatch(r"sliding_window\((\d+)\)", self.mask)
        return int(match[1]) if match else None

    @property
    def value_dim(self) -> int:
        return self.D if self.Dv is None else self.Dv

    @property
    def scale(self) -> float:
        return self.D**-0.5

    def inputs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """What q, k and v look like, in this case's layout."""
        return (
            self._struct(self.Hq, self.Sq, self.D),
            self._struct(self.Hkv, self.Sk, self.D),
            self._struct(self.Hkv, self.Sk, self.value_dim),
        )

    def output(self) -> jax.ShapeDtypeStruct:
        """What the result and its cotangent look like, in this case's layout."""
        return self._struct(self.Hq, self.Sq, self.value_dim)

    def _struct(self, heads: int, length: int, dim: int) -> jax.ShapeDtypeStruct:
        middle = (heads, length) if self.layout == "BHSD" else (length, heads)
        return jax.ShapeDtypeStruct((self.B, *middle, dim), jnp.dtype(self.dtype))


def known(
    argument: str,
    got: str,
    allowed: Iterable[str],
    *,
    noun: str = "value",
    shown: Iterable[str] | None = None,
) -> None:
    """Raises ValueError where `got` is not one of `allowed`, with the nearest right one."""
    if got in allowed:
        return
    names = list(allowed if shown is None else shown)
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(got.lower(), lower, n=1)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else ""
    raise ValueError(f"{argument}: unknown {noun} {got!r}; known: {', '.join(names)}{hint}")
