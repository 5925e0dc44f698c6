"""Forward kernel: normalise, scale, rotate, and write head-major."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import tiles
from .tiles import Config, Shapes


def kernel(
    # inputs
    q_ref,  # [block_s, Hq·D]
    k_ref,  # [block_s, Hkv·D]
    v_ref,  # [block_s, Hkv·Dv]
    q_scale_ref,  # [1, D] float32
    k_scale_ref,  # [1, D] float32
    cos_ref,  # [block_s, D] float32
    sin_ref,  # [block_s, D] float32, signed
    # outputs
    q_out_ref,  # [Hq, block_s, D]
    k_out_ref,  # [Hkv, block_s, D]
    v_out_ref,  # [Hkv, block_s, Dv]
    *,
    norm_eps: float,
):
    block_s, D = cos_ref.shape
    Hkv, _, Dv = v_out_ref.shape
    assert q_ref.shape == (block_s, q_out_ref.shape[0] * D), (q_ref.shape, q_out_ref.shape)
    assert k_ref.shape == (block_s, Hkv * D), (k_ref.shape, k_out_ref.shape)
    assert v_ref.shape == (block_s, Hkv * Dv), (v_ref.shape, v_out_ref.shape)
    assert sin_ref.shape == cos_ref.shape
    assert q_scale_ref.shape == k_scale_ref.shape == (1, D)

    # Rows past S in the last tile hold anything; rows never meet, and theirs are not written back.
    cos, sin = cos_ref[...], sin_ref[...]
    for x_ref, scale_ref, out_ref in (
        (q_ref, q_scale_ref, q_out_ref),
        (k_ref, k_scale_ref, k_out_ref),
    ):
        scale = scale_ref[...]
        for h in range(out_ref.shape[0]):
            x, _ = tiles.normalized(x_ref[:, tiles.head(h, D)], norm_eps)  # [block_s, D]
            out_ref[h] = tiles.rotate(x * scale, cos, sin).astype(out_ref.dtype)
    for h in range(Hkv):
        v_out_ref[h] = v_ref[:, tiles.head(h, Dv)]


def forward(config: Config, q, k, v, q_scale, k_scale, cos, sin):
    """``q, k, v [B, S, H, D]`` → ``[B, H, S, D]``.

    ``q_scale, k_scale [D]`` and ``cos, sin [S, D/2]`` or ``[B, S, D/2]`` are float32.
    """
    shapes = Shapes.of(q, k, v)
    B, S, Hq, Hkv, D, Dv = (getattr(shapes, n) for n in ("B", "S", "Hq", "Hkv", "D", "Dv"))
    block_s = shapes.block_s(copies=2, wanted=config.block_s)
    cos, sin = tiles.rotation_tables(cos, sin)
    return pl.pallas_call(
        functools.partial(kernel, norm_eps=config.norm_eps),
        grid=(pl.cdiv(S, block_s), B),
        in_specs=[
            shapes.projected(block_s, Hq, D),
            shapes.projected(block_s, Hkv, D),
            shapes.projected(block_s, Hkv, Dv),
            shapes.scale(),
            shapes.scale(),
            shapes.table(block_s, cos),
            shapes.table(block_s, sin),
        ],
        out_specs=[
            shapes.by_head(block_s, Hq, D),
            shapes.by_head(block_s, Hkv, D),
            shapes.by_head(block_s, Hkv, Dv),
        ],
        out_shape=[
            tiles.out_struct(q, (B, Hq, S, D), q.dtype),
            tiles.out_struct(q, (B, Hkv, S, D), q.dtype),
            tiles.out_struct(q, (B, Hkv, S, Dv), q.dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=config.interpret,
        name="smalti_qk_norm_rope_forward",
    )(
        *(tiles.heads_in_lanes(x) for x in (q, k, v)),
        *(jnp.reshape(scale, (1, D)) for scale in (q_scale, k_scale)),
        cos,
        sin,
    )
