"""Decoding as StreamingLLM describes it, in NumPy: token by token, over the keys that are retained.

Nothing is cached but the raw keys and values, in a list; for each token the retained ones are taken
in the order of the cache, sink tokens first and then the window by age, rotated by their places in
it, or by their positions in the sequence, and attended to.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import ml_dtypes
import numpy as np

from smalti.attention.oracle import Result
from tests.support.budgets import Judge


@dataclasses.dataclass(frozen=True)
class Rules:
    """What fixes the result beside the arrays; the options as `attend` has them."""

    sinks: int
    window: int
    positions: str | None = None
    rope_theta: float = 10_000.0
    rope_interleaved: bool = False
    rotary_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def options(self) -> dict:
        names = ["positions", "scale", "softcap"]
        if self.positions is not None:
            names += ["rope_theta", "rope_interleaved", "rotary_dim"]
        return {name: getattr(self, name) for name in names}

    def retained(self, i: int) -> list[int]:
        """The positions of the keys in the cache when token i is in it, in the cache's order."""
        first_of_window = max(self.sinks, i - self.window + 1)
        return [*range(min(self.sinks, i + 1)), *range(first_of_window, i + 1)]


def rotated(x, positions, rules: Rules):
    """``x [n, H, D]`` by ``positions [n]``: RoPE by the formula of `qk_norm_rope`'s docstring."""
    dim = x.shape[-1] if rules.rotary_dim is None else rules.rotary_dim
    angle = np.asarray(positions, x.dtype)[:, None, None] * (
        x.dtype.type(rules.rope_theta) ** (-np.arange(0, dim, 2, dtype=x.dtype) / dim)
    )
    cos, sin = np.cos(angle), np.sin(angle)
    lanes = np.arange(dim)
    first, second = lanes.reshape(-1, 2).T if rules.rope_interleaved else lanes.reshape(2, -1)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


class Token(NamedTuple):
    out: np.ndarray  # [Hq, Dv]
    magnitude: np.ndarray  # [Hq, Dv]: what the sum's terms would lose
    keys: int


def token(q, k, v, i: int, rules: Rules, storage=None) -> Token:
    """Of ``q [S, Hq, D]``, … token i. storage: what a plain computation would keep rotated arrays,
    weights and the result in."""

    def stored(x):
        return x if storage is None else x.astype(storage).astype(x.dtype)

    kept = rules.retained(i)
    q, k, v = q[i : i + 1], k[kept], v[kept]
    if rules.positions is not None:
        by_place = rules.positions == "cache"
        places = np.arange(len(kept)) if by_place else np.array(kept)
        q, k = stored(rotated(q, places[-1:], rules)), stored(rotated(k, places, rules))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("hd,jhd->hj", q[0], k)
    scores = scores * scores.dtype.type(q.shape[2] ** -0.5 if rules.scale is None else rules.scale)
    if rules.softcap is not None:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    lse = np.abs(top + np.log(total))
    out = np.einsum("hj,jhd->hd", stored(weights), v) / total
    magnitude = np.einsum("hj,jhd->hd", weights / total * (1 + lse), np.abs(v))
    return Token(stored(out), magnitude, len(kept))


def sequence(q, k, v, rules: Rules, dtype=np.float64, storage=None) -> list[Token]:
    arrays = [np.asarray(x).astype(dtype) for x in (q, k, v)]
    return [token(*arrays, i, rules, storage) for i in range(len(q))]


def judge(q, k, v, rules: Rules) -> Judge:
    """Of one sequence, ``q [S, Hq, D]``: the exact result and how far from it one may be."""
    exact = sequence(q, k, v, rules)
    narrow = None if q.dtype == np.float32 else ml_dtypes.finfo(q.dtype).dtype
    plain = sequence(q, k, v, rules, np.float32, narrow)

    def result(tokens) -> Result:
        out = np.stack([x.out for x in tokens])
        return Result(out, *(None,) * 6, (), np.array(0), np.array(0), None, None)

    counts = np.array([x.keys for x in exact])[:, None, None]
    magnitude = np.stack([x.magnitude for x in exact])
    return Judge(result(exact), result(plain), {"out": magnitude}, {"out": counts})
