"""Where a tile is, and a part of it, inside of a kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from smalti.attention.tpu.tiles import Part, Walk
from smalti.tpu.lanes import LANES, round_up


@dataclasses.dataclass(frozen=True)
class Place:
    """Of a tile."""

    b: Any  # batch entry
    h: Any  # query head
    q: Any  # its first query, in the major block
    kv: Any  # its first key, in the major block
    q_global: Any  # the same in the sequence
    kv_global: Any
    kv_major: Any  # the first key of the major block
    q_len: int  # queries that exist
    kv_padded: int  # keys in all

    def queries(self, part: Part):
        return pl.ds(self.q + part.q_start, part.q_stop - part.q_start)

    def keys(self, part: Part):
        first = self.kv if part.place is None else 0
        return pl.ds(first + part.kv_start, part.kv_stop - part.kv_start)

    def q_indices(self, part: Part):
        """int32 ``[1, queries]``"""
        shape = 1, part.q_stop - part.q_start
        return self.q_global + part.q_start + lax.broadcasted_iota(jnp.int32, shape, 1)

    def kv_indices(self, part: Part):
        """int32 ``[keys, 1]``"""
        shape = part.kv_stop - part.kv_start, 1
        first = self.kv_global if part.place is None else self.kv_major
        return first + part.kv_start + lax.broadcasted_iota(jnp.int32, shape, 0)

    def differences(self, part: Part):
        """Of a relative operand, what the tile reads: ``[keys + queries]`` of them."""
        keys = round_up(part.kv_stop - part.kv_start)
        first = self.kv_global if part.place is None else self.kv_major
        start = self.q_global + part.q_start - first - part.kv_start
        start = pl.multiple_of(start - keys + self.kv_padded, LANES)
        return pl.ds(start, keys + part.q_stop - part.q_start)


def place_of(t, tiles_ref, at, grid) -> Place:
    """The place of tile ``t`` of the list, in the step that is at ``at``."""
    walk: Walk = grid.walk
    blocks, tile = walk.blocks, tiles_ref[0, walk.num_counts + t]
    q = pl.multiple_of((tile >> 16) * blocks.block_q, blocks.block_q)
    kv = pl.multiple_of((tile & 0xFFFF) * LANES, LANES)
    kv_major = at.j * blocks.major_kv
    starts = at.i * blocks.major_q + q, kv_major + kv
    return Place(at.b, grid.q_head(at), q, kv, *starts, kv_major, walk.q_len, walk.kv_padded)
