"""Q/K RMSNorm and RoPE in NumPy: the truth in float64, and how far float32 strays from it.

`exact` and `gradients` know no derivative formula: rows do not depend on each other, so a complex
step along one lane of every row at once gives a column of all their Jacobians, to 1e-16.
`plain` is a straightforward float32 computation, gradients by the textbook formula; its distance
from the truth is what an implementation is allowed, times `FACTOR`.
"""

import dataclasses

import ml_dtypes
import numpy as np

FACTOR = 4
NAMES = ("q", "k", "v", "q_scale", "k_scale")


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs and cotangents, as NumPy arrays in the dtype that the implementation gets."""

    q: np.ndarray  # [B, S, Hq, D]
    k: np.ndarray  # [B, S, Hkv, D]
    v: np.ndarray  # [B, S, Hkv, Dv]
    q_scale: np.ndarray | None  # [D]
    k_scale: np.ndarray | None
    positions: np.ndarray | None  # [S] or [B, S]
    cotangents: tuple[np.ndarray, ...]  # [B, Hq, S, D], [B, Hkv, S, D], [B, Hkv, S, Dv]
    norm_eps: float | None = 1e-6
    rope_theta: float = 10_000.0
    rope_interleaved: bool = False
    rotary_dim: int | None = None
    position_offset: int | np.ndarray = 0  # scalar or [B]

    @property
    def options(self) -> dict:
        """What is fixed when a call is traced."""
        return {
            "norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_interleaved": self.rope_interleaved,
            "rotary_dim": self.rotary_dim,
        }

    @property
    def positions_of_rows(self) -> np.ndarray:
        """``[B, S]``"""
        B, S = self.q.shape[:2]
        positions = np.arange(S) if self.positions is None else self.positions
        return np.broadcast_to(positions + np.reshape(self.position_offset, (-1, 1)), (B, S))

    @property
    def turning(self) -> int:
        """How many lanes of a head turn."""
        return self.q.shape[-1] if self.rotary_dim is None else self.rotary_dim


def draw(
    B=2,
    S=9,
    Hq=4,
    Hkv=2,
    D=8,
    Dv=6,
    *,
    dtype="float32",
    scales=True,
    positions=None,
    seed=0,
    **options,
) -> Case:
    rng = np.random.default_rng(seed)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    def scale():
        return (1 + 0.3 * rng.normal(size=D)).astype(np.float32) if scales else None

    return Case(
        q=normal(B, S, Hq, D),
        k=normal(B, S, Hkv, D),
        v=normal(B, S, Hkv, Dv),
        q_scale=scale(),
        k_scale=scale(),
        positions=positions,
        cotangents=(normal(B, Hq, S, D), normal(B, Hkv, S, D), normal(B, Hkv, S, Dv)),
        **options,
    )


def turn(x, scale, case: Case):
    """``x [B, S, H, D]``, float64 or complex128, normalised and rotated: ``[B, H, S, D]``."""
    n, D, R = x, x.shape[-1], case.turning
    if case.norm_eps is not None:
        n = n / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / D + case.norm_eps)
    if scale is not None:
        n = n * scale
    # As complex numbers: a pair of lanes is one, and the rotation a product. Written out over two
    # reals, because a complex step needs the imaginary unit for itself.
    i = np.arange(R // 2)
    angle = case.positions_of_rows[:, :, None, None] * case.rope_theta ** (-2.0 * i / R)
    matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    a, b = (2 * i, 2 * i + 1) if case.rope_interleaved else (i, i + R // 2)
    turned = n.copy()
    turned[..., a], turned[..., b] = np.einsum(
        "rc...,c...->r...", matrix, np.stack([n[..., a], n[..., b]])
    )
    return turned.transpose(0, 2, 1, 3)


def wide(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def exact(case: Case):
    """The three outputs in float64."""
    q, k, v, q_scale, k_scale = (wide(getattr(case, name)) for name in NAMES)
    return turn(q, q_scale, case), turn(k, k_scale, case), v.transpose(0, 2, 1, 3)


def gradients(case: Case):
    """Those of ``Σ cotangent · output`` in q, k, v, q_scale, k_scale, in float64."""
    q, k, _, q_scale, k_scale = (wide(getattr(case, name)) for name in NAMES)
    dq_out, dk_out, dv_out = (wide(x) for x in case.cotangents)
    step = 1e-30j

    def lanes(x, scale, dout):
        D = x.shape[-1]
        dx, dscale = np.empty_like(x), np.empty(D)
        ones = np.ones(D) if scale is None else scale
        for d, unit in enumerate(np.eye(D)):
            along_x = np.imag(turn(x + step * unit, ones, case)) / abs(step)
            along_scale = np.imag(turn(x, ones + step * unit, case)) / abs(step)
            dx[..., d] = np.sum(along_x * dout, axis=-1).transpose(0, 2, 1)
            dscale[d] = np.sum(along_scale * dout)
        return dx, (None if scale is None else dscale)

    dq, dq_scale = lanes(q, q_scale, dq_out)
    dk, dk_scale = lanes(k, k_scale, dk_out)
    return dq, dk, dv_out.transpose(0, 2, 1, 3), dq_scale, dk_scale


def plain(case: Case):
    """Outputs and gradients in float32, rounded to the dtype of the inputs at the end.

    Each comes with the size of the terms it was added up from, for a sum of few terms may be
    right by luck.
    """
    one = np.float32(1)
    dtype = case.q.dtype

    def narrow(x):
        return np.asarray(x).astype(np.float32)

    R = case.turning
    frequency = narrow(case.rope_theta ** (-np.arange(0, R, 2) / R))
    angle = narrow(case.positions_of_rows)[:, :, None, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)

    def rotate(x, sin):
        pair, axis = ((R // 2, 2), -1) if case.rope_interleaved else ((2, R // 2), -2)
        a, b = np.moveaxis(x[..., :R].reshape(*x.shape[:-1], *pair), axis, 0)
        turned = np.stack([a * cos - b * sin, b * cos + a * sin], axis=axis)
        return np.concatenate([turned.reshape(*x.shape[:-1], R), x[..., R:]], axis=-1)

    def both(x, scale, dout):
        x, dout = narrow(x), narrow(dout).transpose(0, 2, 1, 3)
        w = one if scale is None else narrow(scale)
        dy = rotate(dout, -sin)
        dn = dy * w
        if case.norm_eps is None:
            n, dx, dx_size = x, dn, np.abs(dn)
        else:
            r = one / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(case.norm_eps))
            n = x * r
            projection = np.mean(np.abs(dn * n), -1, keepdims=True)
            dx = r * (dn - n * np.mean(dn * n, -1, keepdims=True))
            dx_size = r * (np.abs(dn) + np.abs(n) * projection)
        out = rotate(n * w, sin).transpose(0, 2, 1, 3)
        terms = (dy * n).reshape(-1, x.shape[-1])
        dscale = np.cumsum(terms, axis=0, dtype=np.float32)[-1]
        return (
            (out.astype(dtype), np.abs(out)),
            (dx.astype(dtype), dx_size),
            None if scale is None else (dscale, np.sum(np.abs(terms), axis=0)),
        )

    q, dq, dq_scale = both(case.q, case.q_scale, case.cotangents[0])
    k, dk, dk_scale = both(case.k, case.k_scale, case.cotangents[1])
    v, dv = case.v.transpose(0, 2, 1, 3), case.cotangents[2].transpose(0, 2, 1, 3)
    return (q, k, (v, np.abs(v))), (dq, dk, (dv, np.abs(dv)), dq_scale, dk_scale)


def excess(got, truth, low, rows=None) -> float:
    """The largest error over what is allowed in its bucket of ``rows``; right if at most 1.

    Rows are bucketed by the binary logarithm of their position, with which the error of a float32
    angle grows. In each bucket `FACTOR` times the error of the plain computation is allowed, or
    as many half units in the last place of its largest term.
    """
    value, size = low
    assert got.shape == truth.shape == value.shape, (got.shape, truth.shape, value.shape)
    assert got.dtype == value.dtype, (got.dtype, value.dtype)
    error = np.abs(wide(got) - truth)
    assert np.isfinite(error).all(), "not finite"
    plain_error = np.abs(wide(value) - truth)
    half_ulp = float(ml_dtypes.finfo(value.dtype).eps) / 2 * wide(size)
    if rows is None:
        buckets = np.zeros(error.shape, int)
    else:
        buckets = np.broadcast_to(np.log2(1 + np.abs(rows)).astype(int), error.shape)
    worst = 0.0
    for bucket in np.unique(buckets):
        inside = buckets == bucket
        limit = FACTOR * max(plain_error[inside].max(), half_ulp[inside].max())
        worst = max(worst, error[inside].max() / max(limit, np.finfo(np.float64).tiny))
    return worst


def excesses(case: Case, outputs, grads=None) -> dict[str, float]:
    """`excess` of each output ("q", …) and, where given, of each gradient ("dq", …)."""
    by_head = case.positions_of_rows[:, None, :, None]
    by_token = case.positions_of_rows[:, :, None, None]
    low_outputs, low_grads = plain(case)
    result = {
        name: excess(np.asarray(got), truth, low, by_head)
        for name, got, truth, low in zip(NAMES, outputs, exact(case), low_outputs, strict=False)
    }
    for name, got, truth, low in zip(NAMES, grads or (), gradients(case), low_grads, strict=False):
        rows = None if name.endswith("scale") else by_token
        if truth is None:
            assert got is None
        else:
            result["d" + name] = excess(np.asarray(got), truth, low, rows)
    return result
