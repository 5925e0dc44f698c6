"""A nanoGPT-style decoder in plain JAX: parameters are a nested dict, the model is a function.

RMSNorm before each part, RMSNorm and RoPE on queries and keys (`preprocess`), squared-ReLU MLP
(arXiv:2109.08668), no biases. After modded-nanogpt, projections back into the residual stream
start at zero, so that at first a block changes nothing.

Shapes: B rows, S tokens, C = dim, H query heads, K key heads, D = C / H, V = vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nanogpt_jax.config import ModelConfig

Params = dict[str, Any]
Attention = Callable[..., jax.Array]
"""(q [B,S,H,D], k [B,S,K,D], v [B,S,K,D], q_scale [D], k_scale [D]) -> [B,H,S,D]: preprocessing
and attention, as `nanogpt_jax.attention.make_attention` puts them together."""


def init_params(config: ModelConfig, vocab_size: int, seed: int) -> Params:
    """Float32 parameters; matrices are stored [in, out]."""
    C, D, hidden = config.dim, config.head_dim, config.mlp_ratio * config.dim
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * config.num_layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        # Uniform with variance 1 / (3 rows), as modded-nanogpt and PyTorch's Linear have it.
        bound = rows**-0.5
        return jax.random.uniform(next(keys), (rows, columns), jnp.float32, -bound, bound)

    def block() -> Params:
        return {
            "attention": {
                "q": matrix(C, C),
                "k": matrix(C, config.kv_heads * D),
                "v": matrix(C, config.kv_heads * D),
                "q_scale": jnp.ones(D),
                "k_scale": jnp.ones(D),
                "out": jnp.zeros((C, C)),
            },
            "attention_norm": jnp.ones(C),
            "mlp": {"up": matrix(C, hidden), "down": jnp.zeros((hidden, C))},
            "mlp_norm": jnp.ones(C),
        }

    params = {
        # A tied table is the head too: small, so that the first logits are.
        "embedding": jax.random.normal(next(keys), (vocab_size, C))
        * (0.02 if config.tie_embeddings else 1.0),
        "blocks": [block() for _ in range(config.num_layers)],
        "final_norm": jnp.ones(C),
    }
    if not config.tie_embeddings:
        params["head"] = jnp.zeros((C, vocab_size))
    return params


def forward(
    params: Params,
    tokens: jax.Array,
    *,
    config: ModelConfig,
    attention: Attention,
    dtype=jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Logits, float32 [B, S, V], of int tokens [B, S].

    dtype: of the matrix products and what flows between them; norms and logits are float32.
    remat: keep of each block its input only, and compute the rest again in the backward pass.
    """
    run_block = functools.partial(block, config=config, attention=attention)
    if remat:
        run_block = jax.checkpoint(run_block)

    x = params["embedding"][tokens].astype(dtype)  # [B, S, C]
    x = rms_norm(x, 1.0, config.norm_eps)
    for layer in params["blocks"]:
        x = run_block(layer, x)
    x = rms_norm(x, params["final_norm"], config.norm_eps)
    head = params["embedding"].T if config.tie_embeddings else params["head"]  # [C, V]
    return jnp.matmul(x, head.astype(dtype), preferred_element_type=jnp.float32)


def block(layer: Params, x: jax.Array, *, config: ModelConfig, attention: Attention) -> jax.Array:
    """x [B, S, C] after attention and MLP have each added to it."""
    B, S, _ = x.shape
    w = layer["attention"]

    h = rms_norm(x, layer["attention_norm"], config.norm_eps)
    q = linear(h, w["q"]).reshape(B, S, config.num_heads, config.head_dim)
    k = linear(h, w["k"]).reshape(B, S, config.kv_heads, config.head_dim)
    v = linear(h, w["v"]).reshape(B, S, config.kv_heads, config.head_dim)
    h = attention(q, k, v, w["q_scale"], w["k_scale"])  # [B, H, S, D]
    x = x + linear(jnp.swapaxes(h, 1, 2).reshape(B, S, -1), w["out"])

    h = rms_norm(x, layer["mlp_norm"], config.norm_eps)
    h = jnp.square(jax.nn.relu(linear(h, layer["mlp"]["up"])))
    return x + linear(h, layer["mlp"]["down"])


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight.astype(x.dtype))


def rms_norm(x: jax.Array, scale, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32 (arXiv:1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats per token, float32 [B, S], of float32 logits [B, S, V] and int targets [B, S]."""
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - right


def count_params(params: Params) -> int:
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def flops_per_token(config: ModelConfig, vocab_size: int, visible_per_query: float) -> float:
    """Useful FLOPs of a training token, forward and backward, without recomputation.

    2 for each weight of a matrix product (the embedding is a look-up) and 4 · H · D for each
    visible key: QKᵀ and PV. The backward pass takes twice the forward's (PaLM, arXiv:2204.02311,
    appendix B, but counting the keys that the mask leaves instead of all S).
    """
    C, D = config.dim, config.head_dim
    in_block = 2 * C * C + 2 * C * config.kv_heads * D + 2 * C * config.mlp_ratio * C
    products = 2 * (config.num_layers * in_block + C * vocab_size)
    attention = 4 * config.num_layers * config.num_heads * D * visible_per_query
    return 3 * (products + attention)
