"""`attention.impl` and `attention.preprocess` of the config: which code runs, and why.

Nothing falls back: what cannot run here is a UserError before the run starts.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import smalti
import smalti.masks
import smalti.preprocess
from nanogpt_jax.config import AttentionConfig, Config, UserError
from nanogpt_jax.model import Attention

# Scopes around the two parts, by which a compiled program's operations are told apart.
IMPL_SCOPE, PREPROCESS_SCOPE = "attention.impl", "attention.preprocess"


@dataclass(frozen=True)
class AttentionChoice:
    """attention: for `model.forward`. preprocess: its first part, `smalti.preprocess.qk_norm_rope`
    with the model's options. visible_pairs: of one head and row, seq_len² without a mask.
    description: lines for the log. check_vma: whether it runs under shard_map's default checks."""

    attention: Attention
    preprocess: Callable
    visible_pairs: int
    description: tuple[str, ...]
    check_vma: bool = True


def make_attention(
    config: Config, seq_len: int | None = None, platform: str | None = None
) -> AttentionChoice:
    """What the config asks for, at training.seq_len unless another is given.

    platform: where it is to run, "tpu" when compiling for one that is not here; None: here.

    Raises UserError where that cannot run on the platform or would let a token see its target.
    """
    S = seq_len or config.training.seq_len
    here = jax.default_backend()
    platform = platform or here
    kernel, reason = _kernel(config.attention, platform, S)
    preprocess, how = _preprocess(config, platform)
    pairs = count_visible_pairs(config.attention.mask_text, S)
    if not pairs:
        raise UserError(
            f"attention.mask: {config.attention.mask_text!r} hides every key from every query of "
            f"{S}: nothing would be attended to; use a mask that leaves some, such as 'causal()'"
        )

    def attention(q, k, v, q_scale, k_scale):
        with jax.named_scope(PREPROCESS_SCOPE):
            q, k, v = preprocess(q, k, v, q_scale=q_scale, k_scale=k_scale)
        with jax.named_scope(IMPL_SCOPE):
            return kernel(q, k, v)

    if reason is None:
        chosen_there = f"smalti.attention, which chooses on the {platform}"
        reason = _explain(config, S) if platform == here else chosen_there
        if config.attention.interpret:
            reason += ", in interpret mode (slow)"
    description = (
        f"attention.impl={config.attention.impl}: {reason}",
        f"attention.mask: {config.attention.mask_text} leaves {pairs / S**2:.1%} of {S} × {S}",
        f"attention.preprocess={config.attention.preprocess}: {how}",
    )
    # The kernels of jax do not say over which devices their results vary.
    checks = config.attention.impl not in ("jax_flash", "splash")
    return AttentionChoice(attention, preprocess, pairs, description, check_vma=checks)


def count_visible_pairs(mask_text: str, S: int, rows: int = 1024) -> int:
    """How many of the S² pairs (query, key) the mask leaves, exactly.

    Raises UserError when some query sees a later key: a language model would read its own target.
    """
    try:
        mask = smalti.masks.parse(mask_text).bind(1, 1, S, S)
    except ValueError as error:  # documents of another length
        raise UserError(f"attention.mask: {error}") from None
    keys, pairs = np.arange(S)[None, :], 0
    for first in range(0, S, rows):
        queries = np.arange(first, min(first + rows, S))[:, None]
        visible = np.asarray(mask(0, 0, jnp.asarray(queries), jnp.asarray(keys)))
        visible = np.broadcast_to(visible, (len(queries), S))
        future = np.argwhere(visible & (keys > queries))
        if len(future):
            q, k = future[0]
            raise UserError(
                f"attention.mask: in {mask_text!r} query {first + q} sees key {k}, which comes "
                "later: a language model would read its own target; add '& causal()'"
            )
        pairs += int(visible.sum())
    return pairs


Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _kernel(config: AttentionConfig, platform: str, S: int) -> tuple[Kernel, str | None]:
    """q [B,H,S,D], k and v [B,K,S,D] -> [B,H,S,D]; and why, where smalti does not say it."""
    mask = smalti.masks.parse(config.mask_text)
    if config.impl == "xla":
        return functools.partial(masked_softmax, mask=mask), "masked softmax over all S × S scores"
    if config.kernels_of_smalti:
        return cast(Kernel, functools.partial(smalti.attention, **_arguments(config))), None
    if platform != "tpu":
        raise UserError(
            f"attention.impl: got {config.impl!r}, a kernel of jax for TPUs, on platform "
            f"{platform!r}; use 'ours' or 'xla' here"
        )
    if config.impl == "jax_flash":
        return _jax_flash, "jax.experimental.pallas.ops.tpu.flash_attention, on a TPU"
    return functools.partial(_splash, S=S), (
        "jax.experimental.pallas.ops.tpu.splash_attention, on a TPU"
    )


def _arguments(config: AttentionConfig) -> dict[str, Any]:
    """What `smalti.attention` gets besides arrays. It picks the kernels on a TPU by itself."""
    on_request = {"implementation": "pallas", "interpret": True} if config.interpret else {}
    return {"mask": smalti.masks.parse(config.mask_text), "layout": "BHSD", **on_request}


def masked_softmax(q: jax.Array, k: jax.Array, v: jax.Array, *, mask) -> jax.Array:
    """The baseline, as written by hand in most models: compute all scores, then mask them."""
    B, H, S, D = q.shape
    q = q.reshape(B, k.shape[1], -1, S, D)  # [B, K, H/K, S, D]
    scores = jnp.einsum("bkgqd,bksd->bkgqs", q, k, preferred_element_type=jnp.float32)
    index = jnp.arange(S)
    visible = mask.bind(1, 1, S, S)(0, 0, index[:, None], index[None, :])
    weights = jax.nn.softmax(jnp.where(visible, scores * D**-0.5, -jnp.inf))
    return jnp.einsum("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v).reshape(B, H, S, D)


def _jax_flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))  # it knows no GQA
    sizes = dict.fromkeys((x.name for x in dataclasses.fields(BlockSizes)), _block(q.shape[2]))
    sizes["block_b"] = 1
    return flash_attention(
        q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=BlockSizes(**sizes)
    )


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *, S: int) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    mask = splash.MultiHeadMask([splash.CausalMask((S, S))] * q.shape[1])
    block = _block(S)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=min(block, 512),
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    return cast(jax.Array, jax.vmap(kernel)(q * q.shape[-1] ** -0.5, k, v))  # it does not scale


def _block(S: int) -> int:
    """For the kernels of jax: with their own blocks of 128 they take several times as long, and
    1024 is the quickest of what `smalti estimate` tried for v6e."""
    return next((size for size in (1024, 512, 256) if S % size == 0), 128)


def _preprocess(config: Config, platform: str) -> tuple[Callable, str]:
    """Q/K RMSNorm, RoPE and (B,S,H,D) -> (B,H,S,D)."""
    interpret, how = None, "the formula in plain JAX, which XLA fuses"
    if config.attention.preprocess == "pallas":
        how = "smalti's Pallas kernels, forward and backward"
        if _interprets(config, platform):
            interpret = True
            how += ", in interpret mode (slow)"
            how += "" if config.attention.interpret else ", as no CPU runs Pallas"
        elif platform != "tpu":
            raise UserError(
                f"attention.preprocess: got 'pallas' on platform {platform!r}, which its TPU "
                "kernels do not run on; use 'xla'"
            )
    return functools.partial(
        smalti.preprocess.qk_norm_rope,
        norm_eps=config.model.norm_eps,
        rope_theta=config.model.rope_theta,
        implementation=config.attention.preprocess,
        interpret=interpret,
    ), how


def _interprets(config: Config, platform: str) -> bool:
    """Whether preprocess=pallas is interpreted: it is asked for by name, so that a CPU does too."""
    return config.attention.interpret or platform == "cpu"


def _explain(config: Config, S: int) -> str:
    """What `smalti.attention` will do with this model's shapes; UserError: it cannot."""
    model, dtype = config.model, jnp.dtype(config.training.dtype)
    rows = config.training.batch_size // config.training.grad_accumulation
    q = jax.ShapeDtypeStruct((rows, model.num_heads, S, model.head_dim), dtype)
    k = jax.ShapeDtypeStruct((rows, model.kv_heads, S, model.head_dim), dtype)
    arguments = _arguments(config.attention)
    choices = []

    def explain(q, k, v):
        choices.append(smalti.explain_choice(q, k, v, **arguments))

    try:
        jax.eval_shape(explain, q, k, k)
    except NotImplementedError as error:
        raise UserError(f"attention.impl: {error}") from None
    return f"smalti.attention, {choices[0]}"
