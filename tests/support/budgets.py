"""How wrong a result may be: a small multiple of what a plain low-precision computation is.

The error of each tensor is taken per bucket of rows by the number of keys they see (for gradients
of keys and values, by the number of queries that see them), because a row that averages n keys
shrinks like 1/√n: one bound for all rows is set by the early ones and blind to the late ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from smalti.attention.oracle import Result, oracle

FACTOR = 4.0  # times the plain computation's error, in the largest and in the mean square
# A plain error may be small by luck, in a bucket of few numbers. What any float32 sum of these
# terms may lose is allowed too: so many units of 2⁻²⁴ of the sum of the terms' absolute values.
ULPS = 2.0
EDGES = np.array([1, 2, 17, 129, 1025, 8193, 1 << 17])  # buckets: 0, 1, 2–16, 17–128, 129–1024, …
TENSORS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclasses.dataclass(frozen=True)
class Excess:
    """Where an error is beyond its budget."""

    tensor: str
    bucket: str
    error: float
    allowed: float

    def __str__(self):
        return f"{self.tensor}, {self.bucket}: error {self.error:.3g}, allowed {self.allowed:.3g}"


@dataclasses.dataclass(frozen=True)
class Judge:
    """The exact answer to one call, and how far from it a result may be."""

    exact: Result
    plain: Result
    magnitude: dict[str, np.ndarray]  # sums of absolute values of terms, as the tensor's shape
    counts: dict[str, np.ndarray]  # how many pairs each number is made of; broadcast to the tensor

    def excesses(self, got: dict[str, np.ndarray]) -> list[Excess]:
        """``got``: tensors by name, those of `TENSORS` and ``captured0``, ``captured1``, …"""
        return [excess for name in got for excess in self._tensor(name, np.asarray(got[name]))]

    def check(self, got: dict[str, np.ndarray]):
        found = self.excesses(got)
        assert not found, "beyond the error budget:\n" + "\n".join(map(str, found))

    def _tensor(self, name: str, got: np.ndarray) -> Iterator[Excess]:
        exact, plain = (self._of(result, name) for result in (self.exact, self.plain))
        assert got.shape == exact.shape, f"{name}: shape {got.shape}, not {exact.shape}"
        storage = ml_dtypes.finfo(got.dtype)
        ulp, least = float(storage.eps) / 2, float(storage.smallest_subnormal)
        got = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error, usual = ((np.where(x == exact, 0, np.abs(x - exact))) for x in (got, plain))
        counts, magnitude = (
            np.broadcast_to(x[name], exact.shape) for x in (self.counts, self.magnitude)
        )
        buckets = np.searchsorted(EDGES, counts, side="right")
        for bucket in np.unique(buckets):
            here = buckets == bucket
            title = _title(int(bucket))
            if bucket == 0 and name != "dsinks":  # nothing is summed: exactly that
                if not np.array_equal(got[here], exact[here]):
                    yield Excess(name, title, float(np.max(error[here])), 0.0)
                continue
            finite = exact[here][np.isfinite(exact[here])]
            largest = np.max(np.abs(finite), initial=0)
            floor = ULPS * 2**-24 * np.max(magnitude[here]) + ulp * largest + least
            for kind, statistic in (("largest", np.max), ("root mean square", _rms)):
                allowed = FACTOR * statistic(usual[here]) + floor
                if not statistic(error[here]) <= allowed:  # NaN fails too
                    yield Excess(name, f"{title}, {kind}", float(statistic(error[here])), allowed)

    @staticmethod
    def _of(result: Result, name: str) -> np.ndarray:
        if name.startswith("captured"):
            return np.asarray(result.dcaptured[int(name[8:])], np.float64)
        return np.asarray(getattr(result, name), np.float64)


def judge(q, k, v, *, dout=None, dlse=None, layout="BSHD", **arguments) -> Judge:
    """The arguments of `oracle`; the precision is that of q's dtype."""
    call = {"dout": dout, "dlse": dlse, "layout": layout, **arguments}
    exact = oracle(q, k, v, **call)
    dtype = q.dtype
    plain = oracle(
        q,
        k,
        v,
        compute_dtype=np.float32,
        storage_dtype=None if dtype == np.float32 else dtype,
        **call,
    )

    def heads_first(x):
        return x if layout == "BHSD" else x.swapaxes(1, 2)

    def clean(x):
        x = heads_first(np.asarray(x)).astype(np.float64)
        return np.abs(np.where(np.isfinite(x), x, 0))

    visible = exact.visible
    batch, heads = visible.shape[:2]
    q, k, v = map(clean, (q, k, v))
    kv_heads = k.shape[1]
    group = heads // kv_heads
    k, v = (np.repeat(x, group, 1) for x in (k, v))

    def per_kv_head(x):
        return x.reshape(batch, kv_heads, group, *x.shape[2:]).sum(2)

    per_row = visible.sum(-1)
    per_key = per_kv_head(visible.sum(2))
    slope = np.where(visible, np.abs(exact.slope), 0)
    terms = np.where(visible, (q @ k.swapaxes(2, 3)) * slope, 0)
    lse = np.abs(np.where(np.isfinite(exact.lse), exact.lse, 0))
    # A weight is exp(score − lse), and loses what these two lose.
    weights = exact.weights * (1 + lse[..., None])
    magnitude = {"out": heads_first(weights @ v), "lse": lse + terms.max(-1) + 1}
    counts = {"out": heads_first(per_row[..., None]), "lse": per_row}
    if exact.dscores is not None:
        # What the score gradient is a difference of.
        dout = clean(np.zeros(heads_first(exact.out).shape) if dout is None else dout)
        dlse = 0 if dlse is None else np.where(np.isfinite(dlse), np.abs(dlse), 0)
        sums = (dout * np.abs(heads_first(exact.out))).sum(-1) + dlse
        dscores = weights * (dout @ v.swapaxes(2, 3) + sums[..., None])
        dproducts = dscores * slope
        magnitude["dq"] = heads_first(dproducts @ k)
        magnitude["dk"] = heads_first(per_kv_head(dproducts.swapaxes(2, 3) @ q))
        magnitude["dv"] = heads_first(per_kv_head(weights.swapaxes(2, 3) @ dout))
        counts["dq"] = counts["out"]
        counts["dk"] = counts["dv"] = heads_first(per_key[..., None])
        bias = arguments.get("bias")
        if bias is not None:
            shape = (1,) * (4 - bias.ndim) + bias.shape
            axes = tuple(i for i, n in enumerate(shape) if n == 1)
            magnitude["dbias"] = dscores.sum(axes, keepdims=True).reshape(bias.shape)
            counts["dbias"] = visible.sum(axes, keepdims=True).reshape(bias.shape)
        if exact.dsinks is not None:
            magnitude["dsinks"] = sums.sum((0, 2))
            counts["dsinks"] = np.array(visible.sum())
        for i, x in enumerate(exact.dcaptured):
            if x is not None:
                # How the sum's terms cancel is not known here: allow for a random walk of them.
                walk = np.sqrt(np.sum(dscores**2)) * max(1.0, float(np.max(terms)))
                coarse = float(ml_dtypes.finfo(dtype).eps) / 2**-23
                magnitude[f"captured{i}"] = np.full(x.shape, walk * coarse)
                counts[f"captured{i}"] = np.array(max(int(visible.sum()), 1))
    return Judge(exact, plain, magnitude, counts)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _title(bucket: int) -> str:
    if bucket == 0:
        return "numbers of no pair"
    first, last = EDGES[bucket - 1], (EDGES[bucket] - 1 if bucket < len(EDGES) else None)
    return f"numbers of {first} to {last} pairs" if first != last else f"numbers of {first} pair"
