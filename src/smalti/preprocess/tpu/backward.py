"""Backward kernel: the transpose of the forward's steps, from its saved inputs.

With ``n = x / rms(x)``, ``y = n · scale`` and ``out = rotate(y)``:
``dy = rotateᵀ(dout)``, ``dscale = Σ_rows dy · n``, and with ``dn = dy · scale``,
``dx = (dn − n · mean(dn · n)) / rms(x)``.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import tiles
from .tiles import Config, Shapes


def kernel(
    # inputs
    q_ref,  # [block_s, Hq·D]
    k_ref,  # [block_s, Hkv·D]
    q_scale_ref,  # [1, D] float32
    k_scale_ref,  # [1, D] float32
    cos_ref,  # [block_s, D] float32
    sin_ref,  # [block_s, D] float32, signed
    dq_out_ref,  # [Hq, block_s, D]: the cotangents of the forward's outputs
    dk_out_ref,  # [Hkv, block_s, D]
    dv_out_ref,  # [Hkv, block_s, Dv]
    # outputs
    dq_ref,  # [block_s, Hq·D]
    dk_ref,  # [block_s, Hkv·D]
    dv_ref,  # [block_s, Hkv·Dv]
    dq_scale_ref,  # [1, D] float32: the sum over this tile
    dk_scale_ref,  # [1, D] float32
    *,
    norm_eps: float,
    S: int,
):
    block_s, D = cos_ref.shape
    Hkv, _, Dv = dv_out_ref.shape
    assert q_ref.shape == dq_ref.shape == (block_s, dq_out_ref.shape[0] * D), q_ref.shape
    assert k_ref.shape == dk_ref.shape == (block_s, Hkv * D), k_ref.shape
    assert dv_ref.shape == (block_s, Hkv * Dv), dv_ref.shape
    assert sin_ref.shape == cos_ref.shape
    assert q_scale_ref.shape == dq_scale_ref.shape == (1, D)

    cos, sin = cos_ref[...], sin_ref[...]
    # Only the sum over rows has to leave out what lies past S in the last tile.
    row = pl.program_id(0) * block_s + jax.lax.broadcasted_iota(jnp.int32, (block_s, D), 0)
    exists = row < S

    for x_ref, scale_ref, dout_ref, dx_ref, dscale_ref in (
        (q_ref, q_scale_ref, dq_out_ref, dq_ref, dq_scale_ref),
        (k_ref, k_scale_ref, dk_out_ref, dk_ref, dk_scale_ref),
    ):
        scale = scale_ref[...]
        dscale = jnp.zeros((block_s, D), jnp.float32)
        for h in range(dout_ref.shape[0]):
            n, inverse_rms = tiles.normalized(x_ref[:, tiles.head(h, D)], norm_eps)
            dy = tiles.rotate_transposed(dout_ref[h].astype(jnp.float32), cos, sin)
            dscale += dy * n
            dn = dy * scale
            dx = inverse_rms * (dn - n * jnp.mean(dn * n, axis=-1, keepdims=True))
            dx_ref[:, tiles.head(h, D)] = dx.astype(dx_ref.dtype)
        # A select and not a product with 0: what lies past S may be NaN.
        dscale_ref[...] = jnp.sum(jnp.where(exists, dscale, 0.0), axis=0, keepdims=True)
    for h in range(Hkv):
        dv_ref[:, tiles.head(h, Dv)] = dv_out_ref[h]


def backward(config: Config, q, k, q_scale, k_scale, cos, sin, dq_out, dk_out, dv_out):
    """Cotangents of the forward's outputs ``[B, H, S, D]`` → those of its inputs.

    Returns ``dq, dk, dv [B, S, H, D]`` in the dtype of q and ``dq_scale, dk_scale [D]`` in
    float32. The scales' gradients leave the kernel as one sum per tile and are added up here, in
    an order that does not depend on timing: two runs are bitwise equal.
    """
    B, S, Hq, D = q.shape
    Hkv, Dv = dv_out.shape[1], dv_out.shape[3]
    shapes = Shapes(B, S, Hq, Hkv, D, Dv, q.dtype.itemsize)
    block_s = shapes.block_s(copies=3, wanted=config.block_s)
    n_tiles = pl.cdiv(S, block_s)
    cos, sin = tiles.rotation_tables(cos, sin)
    tile_sum = pl.BlockSpec((None, None, 1, D), lambda i, b: (i, b, 0, 0))
    dq, dk, dv, dq_scale, dk_scale = pl.pallas_call(
        functools.partial(kernel, norm_eps=config.norm_eps, S=S),
        grid=(n_tiles, B),
        in_specs=[
            shapes.projected(block_s, Hq, D),
            shapes.projected(block_s, Hkv, D),
            shapes.scale(),
            shapes.scale(),
            shapes.table(block_s, cos),
            shapes.table(block_s, sin),
            shapes.by_head(block_s, Hq, D),
            shapes.by_head(block_s, Hkv, D),
            shapes.by_head(block_s, Hkv, Dv),
        ],
        out_specs=[
            shapes.projected(block_s, Hq, D),
            shapes.projected(block_s, Hkv, D),
            shapes.projected(block_s, Hkv, Dv),
            tile_sum,
            tile_sum,
        ],
        out_shape=[
            tiles.out_struct(q, (B, S, Hq * D), q.dtype),
            tiles.out_struct(q, (B, S, Hkv * D), q.dtype),
            tiles.out_struct(q, (B, S, Hkv * Dv), q.dtype),
            tiles.out_struct(q, (n_tiles, B, 1, D), jnp.float32),
            tiles.out_struct(q, (n_tiles, B, 1, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=config.interpret,
        name="smalti_qk_norm_rope_backward",
    )(
        *(tiles.heads_in_lanes(x) for x in (q, k)),
        *(jnp.reshape(scale, (1, D)) for scale in (q_scale, k_scale)),
        cos,
        sin,
        dq_out,
        dk_out,
        dv_out,
    )
    return (
        dq.reshape(B, S, Hq, D),
        dk.reshape(B, S, Hkv, D),
        dv.reshape(B, S, Hkv, Dv),
        jnp.sum(dq_scale, axis=(0, 1, 2)),
        jnp.sum(dk_scale, axis=(0, 1, 2)),
    )
