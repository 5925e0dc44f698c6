"""The kernels read every array once and write every result once: a wrong block spec doubles that
unseen. Bytes are those of the copies in the compiled schedule, by `smalti.estimate`."""

import math

import jax
import jax.numpy as jnp
import pytest

import smalti
from smalti import masks
from smalti.estimate import compile_for, estimate
from tests.support.libtpu import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]

S, Hq = 1024, 8
BLOCKS = smalti.BlockSizes(256, 512)  # the bytes are those of larger tiles, which compile for long


@pytest.mark.parametrize(
    ("D", "Hkv", "layout"),
    [(D, Hkv, "BHSD") for D in (64, 128, 256) for Hkv in (8, 2)] + [(128, 2, "BSHD")],
)
def test_each_array_is_moved_once(D, Hkv, layout):
    B = 8 * 128 * 128 // D // Hkv  # no array fits into VMEM, where XLA would keep it
    # In BSHD, heads come side by side, as from a projection; a program's own arguments [B, S, H, D]
    # are stored with tiles of heads, and XLA would move them.
    sizes = {h: (B, h, S, D) if layout == "BHSD" else (B, S, h * D) for h in (Hq, Hkv)}
    q, k = (jax.ShapeDtypeStruct(sizes[h], jnp.bfloat16) for h in (Hq, Hkv))

    def attention(q, k, v):
        if layout == "BSHD":
            q, k, v = (x.reshape(B, S, -1, D) for x in (q, k, v))
        out = smalti.attention(
            q, k, v, mask=masks.causal(), layout=layout, implementation="pallas",
            block_sizes=BLOCKS,
        )  # fmt: skip
        return out.reshape(sizes[Hq])

    def gradients(q, k, v, dout):
        out, vjp = jax.vjp(attention, q, k, v)
        return out, vjp(dout)

    found = estimate(compile_for(gradients, q, k, k, q, chip="v6e"))
    queries, keys = 2 * math.prod(q.shape), 2 * math.prod(k.shape)
    row = 4 * B * Hq * S  # the logsumexp, delta
    once = {
        "forward": 2 * queries + 2 * keys + row,  # q, k, v → out, lse
        "backward": 3 * queries + 4 * keys + 2 * row,  # q, k, v, dout, lse, delta → dq, dk, dv
    }
    ratios = {
        part: sum(
            s.bytes_hbm_read + s.bytes_hbm_written
            for op, s in found.simulations.items()
            if f"attention_{part}" in op
        )
        / moved
        for part, moved in once.items()
    }
    # Not all of the rows: XLA may keep those in VMEM.
    assert all(0.9 <= ratio <= 1.05 for ratio in ratios.values()), ratios
    # Around the kernels XLA reads out and dout for delta, and moves rows; no array is copied.
    whole = found.bytes_hbm / sum(once.values())
    around = (2 * queries + 4 * row) / sum(once.values())
    assert whole <= 1.05 + around, (whole, ratios, sorted(found.schedule.ops, key=str))
