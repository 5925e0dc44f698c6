"""The public function: check, choose an implementation, call it."""

import jax
import jax.numpy as jnp

from smalti.backend import target_platform

from . import reference, validation, vjp
from .tpu.tiles import Config


def qk_norm_rope(
    q,
    k,
    v,
    *,
    q_scale=None,
    k_scale=None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10_000.0,
    positions=None,
    implementation: str | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """RMS-normalise Q and K, rotate them by their positions, lay Q, K and V out head-major.

    The step between the projections and attention, whose ``layout="BHSD"`` takes the results:

        q, k, v = smalti.preprocess.qk_norm_rope(q, k, v)
        out = smalti.attention(q, k, v, mask=smalti.masks.causal(), layout="BHSD")

    With ``x`` a row of q or k, of length D:

    - ``n = x / sqrt(mean(x²) + norm_eps) · scale``     (RMSNorm, arXiv:1910.07467)
    - ``angle[i] = position · rope_theta^(−2i/D)``, ``i < D/2``     (RoPE, arXiv:2104.09864)
    - ``out[i]       = n[i] · cos(angle[i]) − n[i + D/2] · sin(angle[i])``
    - ``out[i + D/2] = n[i + D/2] · cos(angle[i]) + n[i] · sin(angle[i])``

    The pairs are ``(i, i + D/2)``, as in Llama's and GPT-NeoX's code, not the paper's
    ``(2i, 2i + 1)``. All of it is computed in float32 and rounded once, to the dtype of q. The
    values of v do not change.

    Args:
      q: ``[B, S, Hq, D]``, D even; float32, bfloat16 or float16 (the last not on ``"pallas"``).
      k: ``[B, S, Hkv, D]``, the dtype of q; Hq is a multiple of Hkv.
      v: ``[B, S, Hkv, Dv]``, the dtype of q.
      q_scale, k_scale: floating ``[D]``, shared by the heads; None for no scale.
      norm_eps: positive Python float, added to the mean square.
      rope_theta: positive Python float, the base of the wavelengths.
      positions: integer ``[S]`` or ``[B, S]``, may be traced; None for 0 … S−1. Angles are
        float32, so that their error grows as position · 6e-8 radians.
      implementation: ``"xla"`` (the formula in plain JAX), ``"pallas"`` (one TPU kernel forward,
        one backward), or None: ``"pallas"`` on a TPU if it takes the dtype, else ``"xla"``. The
        platform is that of the mesh in context (`jax.set_mesh`), else the default backend. A
        named one is used or raises. Inside a kernel heads are ranges of the lanes of
        ``[B, S, H·D]``: a q that was just reshaped from a projection costs no copy.
      interpret: True or a ``pltpu.InterpretParams`` runs the Pallas kernels in an interpreter, on
        any platform and slowly. Needs ``implementation="pallas"``.

    Returns:
      ``q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv]`` in the dtype they came in.

    Gradients flow to q, k, v, q_scale and k_scale; the scales' are summed in float32 and are
    bitwise the same in every run. ``"pallas"`` has first reverse-mode derivatives only, and says
    so when asked for others. Rows are independent: what a token holds, NaN too, reaches its own
    row of the results and of dq, dk, dv, and besides these only the scales' gradients.

    Raises:
      ValueError: a shape, dtype, option or combination that no implementation takes.
      TypeError: ``norm_eps`` or ``rope_theta`` is not a Python number.
      NotImplementedError: ``"pallas"`` with float16, with second derivatives, or on another
        platform than a TPU without ``interpret``.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    q_scale, k_scale, positions = (
        None if x is None else jnp.asarray(x) for x in (q_scale, k_scale, positions)
    )
    validation.check_projections(q, k, v)
    B, S, _, D = q.shape
    validation.check_scale("q_scale", q_scale, D)
    validation.check_scale("k_scale", k_scale, D)
    validation.check_positions(positions, B, S)
    validation.check_constant("norm_eps", norm_eps)
    validation.check_constant("rope_theta", rope_theta)
    validation.check_implementation(implementation, interpret)

    if implementation is None:
        kernels_fit = target_platform() == "tpu" and q.dtype in validation.KERNEL_DTYPES
        implementation = "pallas" if kernels_fit else "xla"
    if positions is None:
        positions = jnp.arange(S, dtype=jnp.int32)
    norm_eps, rope_theta = float(norm_eps), float(rope_theta)
    arrays = (q, k, v, q_scale, k_scale, positions)

    if implementation == "xla":
        return reference.qk_norm_rope(*arrays, norm_eps=norm_eps, rope_theta=rope_theta)
    validation.check_kernel(q.dtype, target_platform(), interpret)
    config = Config(norm_eps=norm_eps, interpret=interpret or False)
    return vjp.qk_norm_rope(*arrays, rope_theta=rope_theta, config=config)
