"""AdamW or Muon, with clipping and a learning rate that warms up and decays."""

from typing import cast

import jax
import optax
import optax.contrib

from nanogpt_jax.config import OptimizerConfig
from nanogpt_jax.model import Params


def make_schedule(config: OptimizerConfig, num_iterations: int) -> optax.Schedule:
    """The share of the highest rate at each step: up from 0, then cosine, or constant and down.

    The first step has 1/warm-up rather than 0, so that none is wasted.
    """
    warmup = round(config.warmup_fraction * num_iterations)
    up = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    rest = num_iterations - warmup
    if config.schedule == "cosine":
        down = optax.cosine_decay_schedule(1.0, max(rest, 1), alpha=config.final_fraction)
        return optax.join_schedules([up, down], [warmup])
    decay = min(round(config.decay_fraction * num_iterations), rest)
    constant = optax.constant_schedule(1.0)
    down = optax.linear_schedule(1.0, config.final_fraction, decay) if decay else constant
    return optax.join_schedules([up, constant, down], [warmup, num_iterations - decay])


def make_optimizer(config: OptimizerConfig, num_iterations: int) -> optax.GradientTransformation:
    """Muon (arXiv:2502.16982) takes the blocks' matrices and AdamW the rest, or AdamW takes all.

    Embedding and head are matrices too but look-ups by nature, and stay with AdamW (Jordan, Muon,
    2024). Weight decay is for the blocks' matrices under either.
    """
    schedule = make_schedule(config, num_iterations)

    def times_schedule(rate: float) -> optax.Schedule:
        return lambda step: rate * schedule(step)

    if config.name == "muon":
        update = optax.contrib.muon(
            times_schedule(config.muon_learning_rate),
            beta=config.momentum,
            weight_decay=config.weight_decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_learning_rate=times_schedule(config.learning_rate),
            muon_weight_dimension_numbers=lambda params: jax.tree.map(
                lambda is_matrix: optax.contrib.MuonDimensionNumbers(0, 1) if is_matrix else None,
                block_matrices(cast(Params, params)),
            ),
        )
    else:
        update = optax.adamw(
            times_schedule(config.learning_rate),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=block_matrices,
        )
    if config.clip_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def block_matrices(params: Params) -> Params:
    """A tree like `params`, True for the matrices inside blocks."""
    inside = jax.tree.map(lambda x: x.ndim == 2, params["blocks"])
    return jax.tree.map(lambda _: False, params) | {"blocks": inside}
