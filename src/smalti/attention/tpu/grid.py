"""The steps of a kernel, and the blocks of arrays that each sees."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smalti.attention.tpu import smem
from smalti.attention.tpu.layout import Heads
from smalti.attention.tpu.mods import KernelMod, Kind
from smalti.attention.tpu.scores import Rules
from smalti.attention.tpu.tiles import Walk
from smalti.tpu.launch import launch

Refs = Any  # a namespace of refs by name; an operand that is not there is None
OPTIONAL = ("pairs", "sinks", "bias", "correction", "dq", "dk", "dv", "m", "l", "acc", "dq_acc")
LISTS = ("mask", "score_mod", "dscore_mod")  # of operands, of which there may be none
AXES = ("b", "hkv", "g", "i", "j")


@dataclasses.dataclass(frozen=True)
class Block:
    """An array, or what an output will be, and the block of it that a step sees."""

    name: str
    array: Any  # or jax.ShapeDtypeStruct
    spec: pl.BlockSpec | None = None  # None: prefetched into SMEM before the first step

    @property
    def prefetched(self) -> bool:
        return self.spec is None


@dataclasses.dataclass(frozen=True)
class Grid:
    """The steps of a kernel: one for each batch entry ``b``, key head ``hkv``, query head ``g``
    of its group, major block ``i`` of queries and ``j`` of keys, the last of ``order`` running
    fastest. ``p`` stands for ``i`` and ``j`` where pairs of them without tiles are left out.
    """

    heads: Heads
    walk: Walk
    order: tuple[str, ...]
    sums: tuple[str, ...]  # axes whose steps add to one block of a result

    @classmethod
    def by_queries(cls, heads: Heads, walk: Walk, *, over_queries: bool = False) -> Grid:
        """All steps of a block of queries follow each other; over_queries: some result is a sum
        over those blocks, too."""
        if walk.pairs_by_q is not None:
            return cls(heads, walk, ("b", "hkv", "g", "p"), sums=("p",))
        sums = ("i", "j") if over_queries else ("j",)
        return cls(heads, walk, ("b", "hkv", "g", "i", "j"), sums)

    @classmethod
    def by_keys(cls, heads: Heads, walk: Walk, *, head_by_head: bool) -> Grid:
        """All steps of a block of keys follow each other; head_by_head: those of a query head, too,
        for which all pairs are visited."""
        if walk.pairs_by_kv is not None and not head_by_head:
            return cls(heads, walk, ("b", "hkv", "p", "g"), sums=("p", "g"))
        return cls(heads, walk, ("b", "hkv", "j", "g", "i"), sums=("g", "i"))

    @property
    def semantics(self) -> tuple[Any, ...]:
        """Axes before all sums may run in any order, and on several cores."""
        parallel = min((self.order.index(axis) for axis in self.sums), default=len(self.order))
        return ("parallel",) * parallel + ("arbitrary",) * (len(self.order) - parallel)

    @property
    def sizes(self) -> dict[str, int]:
        heads, walk = self.heads, self.walk
        sizes = heads.B, heads.Hkv, heads.group, walk.num_q, walk.num_kv
        pairs = {} if self._pairs is None else {"p": len(self._pairs)}
        return dict(zip(AXES, sizes, strict=True)) | pairs

    @property
    def _pairs(self):
        """Those that the steps visit, or None for all."""
        if "p" not in self.order:
            return None
        by_keys = self.order.index("p") < self.order.index("g")
        return self.walk.pairs_by_kv if by_keys else self.walk.pairs_by_q

    def ids(self, refs: Refs) -> SimpleNamespace:
        """Where a running step is."""
        return self._at([pl.program_id(n) for n in range(len(self.order))], refs.pairs)

    def _at(self, ids: Sequence[Any], pairs) -> SimpleNamespace:
        at = SimpleNamespace(**dict(zip(self.order, ids, strict=True)))
        if pairs is not None:
            at.pairs, at.i, at.j = pairs, pairs[at.p] >> 16, pairs[at.p] & 0xFFFF
        return at

    def q_head(self, at):
        return at.hkv * self.heads.group + at.g

    def is_first(self, at, *axes: str):
        """Whether a running step is the first of those that differ in these axes alone."""
        first = (getattr(at, axis) == 0 for axis in self._own(axes))
        return functools.reduce(operator.and_, first, self._is_edge(at, axes, -1))

    def is_last(self, at, *axes: str):
        last = (getattr(at, axis) == self.sizes[axis] - 1 for axis in self._own(axes))
        return functools.reduce(operator.and_, last, self._is_edge(at, axes, 1))

    def _own(self, axes: Sequence[str]) -> list[str]:
        return [axis for axis in axes if axis in self.order]

    def _is_edge(self, at, axes: Sequence[str], step: int):
        """Whether the pair ``step`` on is of another block of what is not among the axes."""
        if "p" not in self.order or not {"i", "j"} & set(axes):
            return True
        end = at.p == (0 if step < 0 else self.sizes["p"] - 1)
        if {"i", "j"} <= set(axes):
            return end
        other = at.pairs[jnp.clip(at.p + step, 0, self.sizes["p"] - 1)]
        here, there = (at.i, other >> 16) if "j" in axes else (at.j, other & 0xFFFF)
        return end | (here != there)

    def _spec(self, shape, place, **options) -> pl.BlockSpec:
        def index(*ids):
            prefetched = ids[len(self.order) :]
            pairs = None if self._pairs is None else prefetched[-1]
            at = self._at(ids[: len(self.order)], pairs)
            at.q_block, at.kv_block = at.i, at.j
            if self._fetch is not None:  # of a pair without tiles, what comes next is held
                fetch, entry = ids[-1], self.walk.entry(at.b, self.q_head(at))
                num_q, num_kv = self.walk.num_q, self.walk.num_kv
                if self._keys_outside:
                    at.q_block = fetch[(entry * num_kv + at.j) * num_q + at.i]
                else:
                    at.kv_block = fetch[(entry * num_q + at.i) * num_kv + at.j]
            return place(at)

        return pl.BlockSpec(shape, index, **options)

    @property
    def _keys_outside(self) -> bool:
        return "p" not in self.order and self.order.index("j") < self.order.index("i")

    @property
    def _fetch(self):
        """Which block of the inner axis is held, where some of the pairs visited have no tiles."""
        if "p" in self.order:
            return None
        return self.walk.q_fetch if self._keys_outside else self.walk.kv_fetch

    def by_query(self, name: str, array, dim: int) -> Block:
        """``[major_q, dim]`` of a query head, or its transpose, as the layout is."""
        return self._by_head(
            name, array, self.walk.blocks.major_q, dim, lambda at: (self.q_head(at), at.q_block)
        )

    def by_key(self, name: str, array, dim: int) -> Block:
        """``[major_kv, dim]`` of a key head, or its transpose."""
        blocks = self.walk.blocks
        buffers = {} if blocks.key_buffers == 2 else {"pipeline_mode": pl.Buffered(1)}
        return self._by_head(
            name, array, blocks.major_kv, dim, lambda at: (at.hkv, at.kv_block), **buffers
        )

    def _by_head(self, name: str, array, length: int, dim: int, place, **options) -> Block:
        return Block(name, array, self._spec(*self.heads.spec(length, dim, place), **options))

    def row(self, name: str, array) -> Block:
        """``[1, major_q]`` of a query head, of ``[B, Hq, 1, Sq]``."""
        return Block(
            name,
            array,
            self._spec(
                (None, None, 1, self.walk.blocks.major_q),
                lambda at: (at.b, self.q_head(at), 0, at.q_block),
            ),
        )

    def tiles(self) -> list[Block]:
        """The lists of tiles, and what is prefetched."""
        walk = self.walk
        spec = self._spec(
            (None, 1, walk.lists.shape[2]),
            lambda at: (walk.list_index(at.b, self.q_head(at), at.i, at.j), 0, 0),
            memory_space=pltpu.SMEM,
        )
        prefetched = {"fetch": self._fetch, "pairs": self._pairs}
        # In one axis, as others are padded in SMEM.
        blocks = [
            Block(name, jnp.asarray(x).reshape(-1))
            for name, x in prefetched.items()
            if x is not None
        ]
        return [*blocks, Block("tiles", jnp.asarray(walk.lists), spec)]

    def scalars(self, name: str, array) -> Block:
        """Two axes, whole in SMEM. Of what a reshape gives `jax.vmap` puts its own axis in front:
        of the last two Mosaic wants all."""
        array = array.reshape(-1).reshape(array.shape)
        return Block(name, array, pl.BlockSpec(memory_space=pltpu.SMEM))

    def mods(self, rules: Rules, operands: tuple[tuple, tuple], bias) -> list[Block]:
        """What mask, ``score_mod`` and bias read."""
        mask, score_mod = operands
        blocks = self.operands("mask", rules.mask, mask)
        blocks += self.operands("score_mod", rules.score_mod, score_mod)
        if bias is not None:
            blocks.append(self.like_bias("bias", bias))
        return blocks

    def operands(self, name: str, mod: KernelMod, arrays: Sequence[jax.Array]) -> list[Block]:
        """Those of a mod, padded (`operands.padded`)."""
        blocks = []
        for operand, x in zip(mod.operands, arrays, strict=True):
            if operand.kind == "number":
                blocks.append(self.scalars(name, x[:, :, 0, 0]))
            elif operand.kind == "scores":
                blocks.append(self.like_bias(name, x))
            else:
                blocks.append(self.like_operand(name, operand.kind, x))
        return blocks

    def like_operand(self, name: str, kind: Kind, array) -> Block:
        """``[1, major_q]``, ``[1, major_kv]`` or, of the relative ones, all of ``[1, Sk + Sq]``, of
        ``[1 or B, 1 or Hq, 1, …]``. Also ``[1, 128]``, partial sums of a number's gradient."""
        blocks = self.walk.blocks
        length = {"q": blocks.major_q, "kv": blocks.major_kv}.get(kind, array.shape[3])
        shared = [n == 1 for n in array.shape[:2]]

        def index(at):
            place = {"q": at.q_block, "kv": at.kv_block}.get(kind, 0)
            return 0 if shared[0] else at.b, 0 if shared[1] else self.q_head(at), 0, place

        return Block(name, array, self._spec((None, None, 1, length), index))

    def like_bias(self, name: str, array, *, fetched: bool = True) -> Block:
        """``[major_q or 1, major_kv or 1]`` of ``[1 or B, 1 or Hq, 1 or Sq, 1 or Sk]``. An output
        is not fetched: its blocks are where the step is, also where that has no tiles."""
        majors = self.walk.blocks.major_q, self.walk.blocks.major_kv

        def index(at):
            blocks = (at.q_block, at.kv_block) if fetched else (at.i, at.j)
            place = (at.b, self.q_head(at), *blocks)
            return tuple(x if n > 1 else 0 for x, n in zip(place, array.shape, strict=True))

        block = (m if n > 1 else 1 for m, n in zip(majors, array.shape[2:], strict=True))
        return Block(name, array, self._spec((None, None, *block), index))

    def call(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[Block],
        outputs: Sequence[Block],
        scratch: dict[str, Any],
        *,
        rules: Rules,
        products: int,
        name: str,
        vmem_limit_bytes: int,
        interpret: Any,
    ) -> Sequence[jax.Array]:
        """Run the kernel. ``scratch``: shapes by name. products: of matrices, that a score tile
        takes part in, counted as half over D and half over Dv."""
        names = [x.name for x in (*inputs, *outputs)] + list(scratch)

        def by_name(*refs):
            named = list(zip(names, refs, strict=True))
            lists = {name: [ref for other, ref in named if other == name] for name in LISTS}
            namespace = {**dict.fromkeys(OPTIONAL), **dict(named), **lists}
            kernel(SimpleNamespace(**namespace), rules=rules, grid=self)

        smem.check(inputs)
        sizes = self.sizes
        arrays, outs = [x.array for x in inputs], [x.array for x in outputs]
        return launch(
            by_name,
            *arrays,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=sum(x.prefetched for x in inputs),
                grid=tuple(sizes[axis] for axis in self.order),
                in_specs=[x.spec for x in inputs if not x.prefetched],
                out_specs=[x.spec for x in outputs],
                scratch_shapes=list(scratch.values()),
            ),
            out_shape=outs,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=self.semantics, vmem_limit_bytes=vmem_limit_bytes
            ),
            cost_estimate=self._cost(products, [*arrays, *outs]),
            interpret=interpret,
            name=name,
        )

    def _cost(self, products: int, arrays: Sequence[Any]) -> pl.CostEstimate:
        """For XLA's scheduler; dense where the counts of tiles are traced."""
        walk, heads = self.walk, self.heads
        scores = walk.num_scores or walk.q_padded * walk.kv_padded
        scores *= heads.B * heads.Hq
        return pl.CostEstimate(
            flops=int(scores * products * (heads.D + heads.Dv)),
            transcendentals=scores,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
        )
