"""Sequences that are decoded in chunks, and what they come to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from smalti.decode import RingBuffer, attend
from tests.support.inputs import DTYPES

from . import oracle

IMPLEMENTATIONS = {
    "reference": {"implementation": "reference"},
    "pallas": {"implementation": "pallas", "interpret": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """B sequences, in chunks of T tokens of which each has some: the first ``lengths[i, b]`` of
    chunk i are real, the others NaN."""

    rules: oracle.Rules
    T: int
    lengths: np.ndarray  # [chunks, B]
    Hq: int = 4
    Hkv: int = 2
    D: int = 8
    Dv: int = 8
    dtype: str = "float32"
    seed: int = 0

    @functools.cached_property
    def chunks(self) -> tuple[np.ndarray, ...]:
        """q, k and v, ``[chunks, B, T, H, D]`` each."""
        rng = np.random.default_rng(self.seed)
        padding = np.arange(self.T) >= self.lengths[..., None]
        arrays = []
        for heads, dim in ((self.Hq, self.D), (self.Hkv, self.D), (self.Hkv, self.Dv)):
            x = rng.normal(size=(*self.lengths.shape, self.T, heads, dim))
            x[padding] = np.nan
            arrays.append(x.astype(DTYPES[self.dtype]))
        return tuple(arrays)

    def real(self, x, b: int) -> np.ndarray:
        """Of ``[chunks, B, T, …]`` one sequence's tokens."""
        return np.concatenate([np.asarray(x[i, b, :n]) for i, n in enumerate(self.lengths[:, b])])

    def empty(self) -> RingBuffer:
        """Nothing but NaN in it."""
        cache = RingBuffer.empty(
            self.lengths.shape[1],
            self.Hkv,
            self.D,
            self.Dv,
            sinks=self.rules.sinks,
            window=self.rules.window,
            dtype=self.dtype,
        )
        nan = (jnp.full_like(x, jnp.nan) for x in (cache.k, cache.v))
        return dataclasses.replace(cache, **dict(zip("kv", nan, strict=True)))


def ragged(T: int, chunks: int, B: int, seed: int = 0) -> np.ndarray:
    """``[chunks, B]``: full chunks, empty ones, and all between."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, T + 1, (chunks, B))
    return np.where(rng.random((chunks, B)) < 0.5, T, lengths)


def step(case: Case, implementation: str, **more):
    """A chunk, as a body of `jax.lax.scan`."""
    options = {**IMPLEMENTATIONS[implementation], **case.rules.options, **more}

    def attend_chunk(cache, chunk):
        q, k, v, lengths = chunk
        out, cache = attend(q, cache, k, v, lengths=lengths, **options)
        return cache, out

    return attend_chunk


def compiled(function):
    """An interpreted kernel takes long to compile, and runs but a few times."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def decoded(case: Case, implementation: str, **more):
    """``out [chunks, B, T, Hq, Dv]`` and the last cache."""
    attend_chunk, cache, outs = compiled(step(case, implementation, **more)), case.empty(), []
    for chunk in zip(*case.chunks, np.asarray(case.lengths, np.int32), strict=True):
        cache, out = attend_chunk(cache, chunk)
        outs.append(np.asarray(out))
    return np.stack(outs), cache


def check(case: Case, implementation: str, **more) -> np.ndarray:
    """The result within the budget, of which padding is 0; returns it."""
    outs, cache = decoded(case, implementation, **more)
    assert outs.dtype == DTYPES[case.dtype]
    for b in range(case.lengths.shape[1]):
        q, k, v = (case.real(x, b) for x in case.chunks)
        if len(q):
            oracle.judge(q, k, v, case.rules).check({"out": case.real(outs, b)})
    padding = np.arange(case.T) >= case.lengths[..., None]
    assert (outs[padding] == 0).all()
    np.testing.assert_array_equal(cache.length, case.lengths.sum(0))
    return outs
