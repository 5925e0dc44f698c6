"""The validation loss: nats per token over whole windows, in order."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nanogpt_jax.config import TrainingConfig
from nanogpt_jax.data import Dataset, validation_batches
from nanogpt_jax.model import Params, cross_entropy
from nanogpt_jax.sharding import AXIS, over_devices, shard_rows
from nanogpt_jax.step import Forward


def make_evaluate(
    forward: Forward, dataset: Dataset, config: TrainingConfig, mesh: Mesh, check_vma: bool = True
) -> Callable[..., float | None]:
    """(params, windows, stop) -> mean loss; windows None takes all.

    `stop()` is asked before each batch: once true, the answer is None.
    """
    rows = config.batch_size // config.grad_accumulation

    def on_device(params: Params, inputs, targets, weights):
        losses = cross_entropy(forward(params, inputs), targets).mean(axis=1)
        return jax.lax.psum((losses * weights).sum(), AXIS)

    weighted_sum = jax.jit(
        over_devices(on_device, mesh, (P(), P(AXIS), P(AXIS), P(AXIS)), P(), check_vma)
    )

    def evaluate(
        params: Params, windows: int | None, stop: Callable[[], bool] = lambda: False
    ) -> float | None:
        available = (len(dataset.val_tokens) - 1) // config.seq_len
        count = available if windows is None else min(windows, available)
        batches = validation_batches(
            dataset.val_tokens,
            rows,
            config.seq_len,
            count,
            jax.process_index(),
            jax.process_count(),
        )
        total = 0.0
        for batch in batches:
            if stop():
                return None
            total += float(weighted_sum(params, *(shard_rows(x, mesh) for x in batch)))
        return total / count

    return evaluate
