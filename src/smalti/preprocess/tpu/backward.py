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

from smalti.tpu.launch import launch

from . import lanes, rotation, tiles
from .tiles import Config, Shapes


def kernel(
    # inputs
    q_ref,  # [block_s, Hq·D]
    k_ref,  # [block_s, Hkv·D]
    dq_out_ref,  # [Hq, block_s, D]: the cotangents of the forward's outputs
    dk_out_ref,  # [Hkv, block_s, D]
    dv_out_ref,  # [Hkv, block_s, Dv]
    q_scale_ref,  # [1, D] float32
    k_scale_ref,  # [1, D] float32
    partner_ref,  # [width, width] bfloat16: `lanes.partner_matrix`
    whole_ref,  # [1, width] int32: `rotation.steps_by_lane`
    rest_ref,  # [1, width] float32
    positions_ref,  # [1, n] int32, n: block_s rounded up to lanes
    # outputs
    dq_ref,  # [block_s, Hq·D]
    dk_ref,  # [block_s, Hkv·D]
    dv_ref,  # [block_s, Hkv·Dv]
    dq_scale_ref,  # [1, width] float32: the sum over this tile
    dk_scale_ref,  # [1, width] float32
    # scratch
    cos_ref,  # [block_s, width] float32
    sin_ref,  # [block_s, width] float32
    *,
    norm_eps: float | None,
    angles_shared: bool,
    S: int,
):
    Hq, block_s, D = dq_out_ref.shape
    Hkv, _, Dv = dv_out_ref.shape
    width, itemsize = whole_ref.shape[1], q_ref.dtype.itemsize
    assert q_ref.shape == dq_ref.shape == (block_s, Hq * D), q_ref.shape
    assert k_ref.shape == dk_ref.shape == (block_s, Hkv * D), k_ref.shape
    assert dv_ref.shape == (block_s, Hkv * Dv), dv_ref.shape
    assert cos_ref.shape == sin_ref.shape == (block_s, width), cos_ref.shape
    assert dq_scale_ref.shape == dk_scale_ref.shape == (1, width), dq_scale_ref.shape

    @pl.when((pl.program_id(1) == 0) | (not angles_shared))
    def _():
        cos_ref[...], sin_ref[...] = rotation.cos_sin(positions_ref, whole_ref, rest_ref, block_s)

    for x_ref, scale_ref, dout_ref, dx_ref, dscale_ref in (
        (q_ref, q_scale_ref, dq_out_ref, dq_ref, dq_scale_ref),
        (k_ref, k_scale_ref, dk_out_ref, dk_ref, dk_scale_ref),
    ):
        scale = tiles.scale_by_lane(scale_ref, width)
        dscale_ref[...] = jnp.zeros_like(dscale_ref)
        for chunk in lanes.chunks(dout_ref.shape[0], D, itemsize):
            w = chunk.width
            dout = chunk.read(dout_ref)
            partner = lanes.exact_product(dout, partner_ref[:w, :w])
            dy = dout.astype(jnp.float32) * cos_ref[:, :w] - partner * sin_ref[:, :w]
            dn = dy * scale[:, :w]
            n = x = x_ref[:, chunk.lanes].astype(jnp.float32)
            dx = dn
            if norm_eps is not None:
                # mean(dn · n) = inverse · mean(dn · x): neither mean waits for the other.
                inverse = jax.lax.rsqrt(lanes.mean_of_head(x * x, D) + norm_eps)
                n = x * inverse
                dx = (dn - n * (inverse * lanes.mean_of_head(dn * x, D))) * inverse
            dx_ref[:, chunk.lanes] = dx.astype(dx_ref.dtype)
            dscale = dy * n
            if S % block_s:
                # Only this sum has to leave out what lies past S in the last tile. A select and
                # not a product with 0: it may be NaN.
                row = jax.lax.broadcasted_iota(jnp.int32, dscale.shape, 0)
                dscale = jnp.where(pl.program_id(0) * block_s + row < S, dscale, 0.0)
            dscale_ref[:, :w] += jnp.sum(dscale, axis=0, keepdims=True)
    for chunk in lanes.chunks(Hkv, Dv, itemsize):
        dv_ref[:, chunk.lanes] = chunk.read(dv_out_ref)


def backward(config: Config, q, k, q_scale, k_scale, positions, dq_out, dk_out, dv_out):
    """Cotangents of the forward's outputs ``[B, H, S, D]`` → those of its inputs.

    Returns ``dq, dk, dv [B, S, H, D]`` in the dtype of q and ``dq_scale, dk_scale [D]`` in
    float32. The scales' gradients leave the kernel as one sum per tile and are added up here, in
    an order that does not depend on timing: two runs are bitwise equal.
    """
    B, S, Hq, D = q.shape
    Hkv, Dv = dv_out.shape[1], dv_out.shape[3]
    shapes = Shapes(B, S, Hq, Hkv, D, Dv, q.dtype.itemsize)
    block_s = shapes.block_s(config.block_s, gradients=True)
    n_tiles = pl.cdiv(S, block_s)
    positions = rotation.tiled_positions(positions, block_s)
    shared = (
        *map(jnp.atleast_2d, (q_scale, k_scale)),
        *tiles.constants(config, shapes.width, like=q),
    )
    tile_sum = pl.BlockSpec((None, None, 1, shapes.width), lambda i, b: (i, b, 0, 0))
    dq, dk, dv, dq_scale, dk_scale = launch(
        functools.partial(
            kernel,
            norm_eps=config.norm_eps,
            angles_shared=positions.shape[0] == 1,
            S=S,
        ),
        *(tiles.heads_in_lanes(x) for x in (q, k)),
        dq_out,
        dk_out,
        dv_out,
        *shared,
        positions,
        grid=(n_tiles, B),
        in_specs=[
            shapes.projected(block_s, Hq, D),
            shapes.projected(block_s, Hkv, D),
            shapes.by_head(block_s, Hq, D),
            shapes.by_head(block_s, Hkv, D),
            shapes.by_head(block_s, Hkv, Dv),
            *map(tiles.whole, shared),
            tiles.row(positions),
        ],
        out_specs=[
            shapes.projected(block_s, Hq, D),
            shapes.projected(block_s, Hkv, D),
            shapes.projected(block_s, Hkv, Dv),
            tile_sum,
            tile_sum,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, S, Hq * D), q.dtype),
            jax.ShapeDtypeStruct((B, S, Hkv * D), q.dtype),
            jax.ShapeDtypeStruct((B, S, Hkv * Dv), q.dtype),
            jax.ShapeDtypeStruct((n_tiles, B, 1, shapes.width), jnp.float32),
            jax.ShapeDtypeStruct((n_tiles, B, 1, shapes.width), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((block_s, shapes.width), jnp.float32)] * 2,
        compiler_params=tiles.COMPILER_PARAMS,
        interpret=config.interpret,
        name="smalti_qk_norm_rope_backward",
    )
    return (
        dq.reshape(B, S, Hq, D),
        dk.reshape(B, S, Hkv, D),
        dv.reshape(B, S, Hkv, Dv),
        *(jnp.sum(sums.reshape(-1, D), axis=0) for sums in (dq_scale, dk_scale)),
    )
