"""The public function: check, choose an implementation, call it."""

import jax
import jax.numpy as jnp

from smalti.backend import target_platform

from . import reference, validation, vjp
from .rope import Rope
from .tpu.tiles import Config


def qk_norm_rope(
    q,
    k,
    v,
    *,
    q_scale=None,
    k_scale=None,
    norm_eps: float | None = 1e-6,
    rope_theta: float = 10_000.0,
    rope_interleaved: bool = False,
    rotary_dim: int | None = None,
    positions=None,
    position_offset=0,
    implementation: str | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """RMS-normalise Q and K, rotate them by their positions, lay Q, K and V out head-major.

    The step between the projections and attention, whose ``layout="BHSD"`` takes the results:

        q, k, v = qk_norm_rope(q, k, v)
        out = smalti.attention(q, k, v, mask=smalti.masks.causal(), layout="BHSD")

    With ``x`` a head's row of q or k, of length D, and ``R = rotary_dim``:

    - ``n = x / sqrt(mean(x²) + norm_eps) · scale``     (RMSNorm, arXiv:1910.07467)
    - ``angle[i] = position · rope_theta^(−2i/R)``, ``i < R/2``     (RoPE, arXiv:2104.09864)
    - ``out[i]       = n[i] · cos(angle[i]) − n[i + R/2] · sin(angle[i])``
    - ``out[i + R/2] = n[i + R/2] · cos(angle[i]) + n[i] · sin(angle[i])``
    - ``out[j] = n[j]`` for ``j ≥ R``

    The pairs are ``(i, i + R/2)``, as in Llama's and GPT-NeoX's code; with ``rope_interleaved``
    they are the paper's ``(2i, 2i + 1)``, as in GPT-J's. All of it is computed in float32 and
    rounded once, to the dtype of q; cosines and sines are right to 3e-7 at any position. The values
    of v do not change.

    Args:
      q: ``[B, S, Hq, D]``, D even; float32, bfloat16 or float16 (the last not on ``"pallas"``).
      k: ``[B, S, Hkv, D]``, the dtype of q; Hq is a multiple of Hkv.
      v: ``[B, S, Hkv, Dv]``, the dtype of q.
      q_scale, k_scale: floating ``[D]``, shared by the heads; None for no scale.
      norm_eps: positive Python float, added to the mean square. None leaves the normalisation
        out: then ``n = x · scale``.
      rope_theta: positive Python float, the base of the wavelengths.
      rope_interleaved: whether a pair's lanes are neighbours.
      rotary_dim: even, 2 to D: how many lanes turn, the first ones; None for all D.
      positions: integer ``[S]`` or ``[B, S]``, may be traced; None for 0 … S−1.
      position_offset: integer, scalar or ``[B]``, added to the positions; may be traced.
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
    so when asked for others. Tokens are independent: what one holds, NaN too, reaches its own rows
    of the results and of dq, dk, dv, and besides these only the scales' gradients.

    Raises:
      ValueError: a shape, dtype, option or combination that no implementation takes.
      TypeError: ``norm_eps`` or ``rope_theta`` is not a Python number.
      NotImplementedError: ``"pallas"`` with float16, with second derivatives, or on another
        platform than a TPU without ``interpret``.
    """
    given = positions
    validation.check_projections(q, k, v)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    q_scale, k_scale, positions = (
        None if x is None else validation.as_array(name, x)
        for name, x in (("q_scale", q_scale), ("k_scale", k_scale), ("positions", positions))
    )
    B, S, _, D = q.shape
    validation.check_scale("q_scale", q_scale, D)
    validation.check_scale("k_scale", k_scale, D)
    validation.check_positions(positions, given, B, S)
    validation.check_offset(position_offset, B)
    if norm_eps is not None:
        validation.check_constant("norm_eps", norm_eps)
        norm_eps = float(norm_eps)
    validation.check_constant("rope_theta", rope_theta)
    validation.check_rotary(rotary_dim, rope_interleaved, D)
    validation.check_implementation(implementation, interpret)

    if implementation is None:
        kernels_fit = target_platform() == "tpu" and q.dtype in validation.KERNEL_DTYPES
        implementation = "pallas" if kernels_fit else "xla"
    if positions is None:
        positions = jnp.arange(S, dtype=jnp.int32)
    offset = jnp.asarray(position_offset, jnp.int32)
    positions = positions.astype(jnp.int32) + (offset[:, None] if offset.ndim else offset)
    rope = Rope(
        head_dim=D,
        rotary_dim=D if rotary_dim is None else int(rotary_dim),
        theta=float(rope_theta),
        interleaved=bool(rope_interleaved),
    )
    arrays = (q, k, v, q_scale, k_scale, positions)

    if implementation == "xla":
        return reference.qk_norm_rope(*arrays, norm_eps=norm_eps, rope=rope)
    validation.check_kernel(q.dtype, target_platform(), interpret)
    config = Config(norm_eps=norm_eps, rope=rope, interpret=interpret or False)
    return vjp.qk_norm_rope(*arrays, config=config)
