"""The cache: sink tokens in slots of their own, the window's tokens in a ring behind them.

The token at position ``p`` goes to slot ``p`` if ``p < sinks``, else to ``sinks + (p − sinks) %
window``. With ``sinks + window`` slots the cache holds, once token ``i`` is written, just what
``masks.streaming(sinks=sinks, window=window)`` lets query ``i`` see: ``j < sinks`` or
``i − window < j ≤ i``, whose window counts the query's own token.

In memory there are some rows more, so that XLA's layout of the arrays on a TPU, which wastes least,
is the one that `smalti.decode.tpu` expects: then nothing copies a cache for a kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from smalti.tpu.lanes import LANES, round_up

from .sizes import check_fit, check_sizes, checked_dtype, too_large


def rows_along_lanes(dim: int) -> bool:
    """Whether XLA keeps ``[B, Hkv, rows, dim]`` with its rows along a TPU's lanes, because ``dim``
    would leave some empty."""
    return round_up(dim, 8) < round_up(dim)


def rows_per_tile(dim: int) -> int:
    """How many rows a TPU copies at least: whole lanes, or as many sublanes as any dtype has."""
    return LANES if rows_along_lanes(dim) else 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RingBuffer:
    """Keys and values of the first ``sinks`` and the last ``window`` tokens of each sequence.

    A pytree of the arrays: it may be a carry of `jax.lax.scan`, donated, mapped and sharded. A
    cache that keeps everything is one without sinks whose window is its capacity; a token beyond
    that takes the place of the oldest, as in a sliding window.

    Attributes:
      k: ``[B, Hkv, rows, D]``, a row for each slot and some more, as attention multiplies them:
        keys of a model with RoPE are turned by their positions in the sequence (`attend` does it if
        asked to).
      v: ``[B, Hkv, rows, Dv]``.
      length: int32 ``[B]``, how many tokens each sequence has had. Rows that none of them was
        written to may hold anything: it reaches no result.
    """

    k: Any
    v: Any
    length: Any
    sinks: int = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        window: int,
        sinks: int = 0,
        dtype,
    ) -> RingBuffer:
        """A cache of no tokens. ``value_dim`` is ``head_dim`` unless given; ``dtype`` is that of
        the keys and values to come: float32, bfloat16 or float16."""
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {"value_dim": value_dim, "window": window, "sinks": sinks}
        check_sizes(**sizes)
        dtype = checked_dtype(dtype)
        rows = cls.rows(sinks, window, head_dim, value_dim)
        shapes = [(batch, kv_heads, rows, dim) for dim in (head_dim, value_dim)]
        check_fit(shapes, dtype, sizes)
        try:
            k, v = (jnp.zeros(shape, dtype) for shape in shapes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            why = "the device has no memory for them; jax.jit with out_shardings shares them out"
            raise ValueError(too_large(shapes, dtype, sizes, why)) from error
        length = jnp.zeros(batch, jnp.int32)
        return cls(k=k, v=v, length=length, sinks=int(sinks), window=int(window))

    @staticmethod
    def rows(sinks: int, window: int, head_dim: int, value_dim: int) -> int:
        """How many rows in memory so many slots take."""
        tile = max(rows_per_tile(head_dim), rows_per_tile(value_dim))
        return round_up(sinks + window, tile)

    @property
    def slots(self) -> int:
        return self.sinks + self.window

    @property
    def next_slot(self):
        """int32 ``[B]``: where the next token goes. Of a full cache, the oldest of the window."""
        return self._slot_of(self.length)

    def new_slots(self, T: int, lengths):
        """int32 ``[B, T]``: where the first ``lengths [B]`` of T more tokens go.

        Of more than the window only the last stay; so no two go to one slot. What does not stay
        goes out of bounds, each elsewhere.
        """
        t = jnp.arange(T, dtype=jnp.int32)[None]
        position, after = self.length[:, None] + t, (self.length + lengths)[:, None]
        stays = (position < self.sinks) | (position >= after - self.window)
        outside = self.k.shape[2] + t
        return jnp.where(stays & (t < lengths[:, None]), self._slot_of(position), outside)

    def written(self, k, v, lengths) -> RingBuffer:
        """The cache with the first ``lengths [B]`` tokens of ``k, v [B, Hkv, T, D]``."""
        slots = self.new_slots(k.shape[2], lengths)

        def write(rows, new, slots):  # [Hkv, rows, D], [Hkv, T, D], [T]
            return rows.at[:, slots].set(new, mode="drop", unique_indices=True)

        return dataclasses.replace(
            self,
            k=jax.vmap(write)(self.k, k, slots),
            v=jax.vmap(write)(self.v, v, slots),
            length=self.length + lengths,
        )

    def _slot_of(self, position):
        ring = self.sinks + (position - self.sinks) % self.window
        return jnp.where(position < self.sinks, position, ring)


def sees_slot(slot, t, length, next_slot, *, sinks: int, window: int):
    """Whether the ``t``-th new query, at position ``length + t``, sees a slot of the cache as it
    was before the new tokens. Elementwise over int32, also inside a kernel.

    A slot's ``age`` is how many tokens came after its own, of those in the cache.
    """
    age = next_slot - 1 - slot
    age = jnp.where(age < 0, age + window, age)
    # In the window: was written, length − 1 − age ≥ sinks; and is near, 1 + age + t < window.
    ring = age < jnp.minimum(length - sinks, window - 1 - t)
    ring &= (slot >= sinks) & (slot < sinks + window)
    return ((slot < sinks) & (slot < length)) | ring


def sees_new(u, t, length, *, sinks: int, window: int):
    """Whether the ``t``-th new query sees the ``u``-th new key."""
    return (u <= t) & ((length + u < sinks) | (t - u < window))
