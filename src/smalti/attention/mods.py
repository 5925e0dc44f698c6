"""What turns products into scores: scale, score_mod, softcap, bias and mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from smalti.masks import Mask
from smalti.masks.traced_mod import TracedMod


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mods:
    """``score = softcap(score_mod(scale · q·k)) + bias``, hidden where the mask says so."""

    mask: Mask  # bound to the call
    score_mod: TracedMod | None
    bias: Any  # [B or 1, Hq or 1, Sq or 1, Sk or 1] or None
    scale: float = dataclasses.field(metadata={"static": True})
    softcap: float | None = dataclasses.field(metadata={"static": True})

    @property
    def may_hide(self) -> bool:
        """Whether a key may be hidden by its score (−inf), not only by the mask."""
        return self.bias is not None or self.score_mod is not None

    def cap(self, scores):
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)
