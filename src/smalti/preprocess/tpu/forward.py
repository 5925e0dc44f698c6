"""Forward kernel: normalise, scale, rotate, and write head-major.

With the scale γ and the matrix P that brings a lane its partner (`lanes.partner_matrix`),

    out = (x ∘ (cos ∘ γ) + (x P) ∘ (sin ∘ γ|P|)) · rsqrt(mean(x²) + eps)

RMSNorm (arXiv:1910.07467) divides a row by one number, which may come last; and γ goes into the
tables of RoPE (arXiv:2104.09864), since (x ∘ γ) P = (x P) ∘ (γ|P|). The tables are made once for a
tile of positions and serve all of its heads, and all batch entries that share their positions.
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
    v_ref,  # [block_s, Hkv·Dv]
    q_scale_ref,  # [1, D] float32
    k_scale_ref,  # [1, D] float32
    partner_ref,  # [width, width] bfloat16: `lanes.partner_matrix`
    whole_ref,  # [1, width] int32: `rotation.steps_by_lane`
    rest_ref,  # [1, width] float32
    positions_ref,  # [1, n] int32, n: block_s rounded up to lanes
    # outputs
    q_out_ref,  # [Hq, block_s, D]
    k_out_ref,  # [Hkv, block_s, D]
    v_out_ref,  # [Hkv, block_s, Dv]
    # scratch
    tables_ref,  # [4, block_s, width] float32: scaled cosine and sine for q, for k
    *,
    norm_eps: float | None,
    angles_shared: bool,
):
    Hq, block_s, D = q_out_ref.shape
    Hkv, _, Dv = v_out_ref.shape
    width, itemsize = whole_ref.shape[1], q_ref.dtype.itemsize
    assert q_ref.shape == (block_s, Hq * D), (q_ref.shape, q_out_ref.shape)
    assert k_ref.shape == (block_s, Hkv * D), (k_ref.shape, k_out_ref.shape)
    assert v_ref.shape == (block_s, Hkv * Dv), (v_ref.shape, v_out_ref.shape)
    assert tables_ref.shape[1:] == (block_s, width), tables_ref.shape

    @pl.when((pl.program_id(1) == 0) | (not angles_shared))
    def _():
        cos, sin = rotation.cos_sin(positions_ref, whole_ref, rest_ref, block_s)
        for t, scale_ref in enumerate((q_scale_ref, k_scale_ref)):
            scale = tiles.scale_by_lane(scale_ref, width)
            # A product's left operand has at least eight rows.
            scale = jnp.broadcast_to(scale, (8, width))
            partner_scale = lanes.exact_product(scale, jnp.abs(partner_ref[...]))
            tables_ref[2 * t] = cos * scale[:1]
            tables_ref[2 * t + 1] = sin * partner_scale[:1]

    # Rows past S in the last tile hold anything; rows never meet, and theirs are not written back.
    for t, (x_ref, out_ref) in enumerate(((q_ref, q_out_ref), (k_ref, k_out_ref))):
        for chunk in lanes.chunks(out_ref.shape[0], D, itemsize):
            w = chunk.width
            x = x_ref[:, chunk.lanes]
            partner = lanes.exact_product(x, partner_ref[:w, :w])
            x = x.astype(jnp.float32)
            y = x * tables_ref[2 * t, :, :w] + partner * tables_ref[2 * t + 1, :, :w]
            if norm_eps is not None:
                y *= jax.lax.rsqrt(lanes.mean_of_head(x * x, D) + norm_eps)
            chunk.write(out_ref, y.astype(out_ref.dtype))
    for chunk in lanes.chunks(Hkv, Dv, itemsize):
        chunk.write(v_out_ref, v_ref[:, chunk.lanes])


def forward(config: Config, q, k, v, q_scale, k_scale, positions):
    """``q, k, v [B, S, H, D]`` → ``[B, H, S, D]``.

    ``q_scale, k_scale [D]`` are float32, ``positions [S]`` or ``[B, S]`` int32.
    """
    shapes = Shapes.of(q, k, v)
    B, S, Hq, Hkv, D, Dv = (getattr(shapes, n) for n in ("B", "S", "Hq", "Hkv", "D", "Dv"))
    block_s = shapes.block_s(config.block_s, gradients=False)
    shared = (
        *map(jnp.atleast_2d, (q_scale, k_scale)),
        *tiles.constants(config, shapes.width, like=q),
    )
    positions = rotation.tiled_positions(positions, block_s)
    return launch(
        functools.partial(
            kernel,
            norm_eps=config.norm_eps,
            angles_shared=positions.shape[0] == 1,
        ),
        *(tiles.heads_in_lanes(x) for x in (q, k, v)),
        *shared,
        positions,
        grid=(pl.cdiv(S, block_s), B),
        in_specs=[
            shapes.projected(block_s, Hq, D),
            shapes.projected(block_s, Hkv, D),
            shapes.projected(block_s, Hkv, Dv),
            *map(tiles.whole, shared),
            tiles.row(positions),
        ],
        out_specs=[
            shapes.by_head(block_s, Hq, D),
            shapes.by_head(block_s, Hkv, D),
            shapes.by_head(block_s, Hkv, Dv),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, Hq, S, D), q.dtype),
            jax.ShapeDtypeStruct((B, Hkv, S, D), q.dtype),
            jax.ShapeDtypeStruct((B, Hkv, S, Dv), q.dtype),
        ],
        scratch_shapes=[pltpu.VMEM((4, block_s, shapes.width), jnp.float32)],
        compiler_params=tiles.COMPILER_PARAMS,
        interpret=config.interpret,
        name="smalti_qk_norm_rope_forward",
    )
