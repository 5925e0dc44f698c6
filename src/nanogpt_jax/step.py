"""One training step: mean loss and gradient over all tokens of the batch, then the update."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nanogpt_jax.model import Params, cross_entropy
from nanogpt_jax.sharding import AXIS, over_devices

Forward = Callable[[Params, jax.Array], jax.Array]
"""(params, tokens [B, S]) -> logits [B, S, V]"""


class State(NamedTuple):
    """What a checkpoint holds. `step` is the number of updates made, int32."""

    step: jax.Array
    params: Params
    optimizer: optax.OptState


def init_state(params: Params, optimizer: optax.GradientTransformation) -> State:
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_loss_and_grad(forward: Forward, mesh: Mesh | None, check_vma: bool = True) -> Callable:
    """(params, inputs, targets) -> (loss, gradient); inputs and targets are int32 [A, B, S].

    The A parts of the batch are taken one after the other, in the memory of one. Losses and
    gradients are summed over tokens and divided once, so that A changes nothing but rounding.
    """

    def on_device(params, inputs, targets):
        # Varying: otherwise each part's gradient would be summed over the devices by itself.
        params = jax.lax.pcast(params, AXIS, to="varying")

        def sum_of_losses(params, part):
            inputs, targets = part
            return cross_entropy(forward(params, inputs), targets).sum()

        def add_part(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(sum_of_losses)(params, part)), ()

        parts = (inputs, targets)
        if inputs.shape[0] == 1:
            total = jax.value_and_grad(sum_of_losses)(params, jax.tree.map(lambda x: x[0], parts))
        else:
            zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            zero = (jax.lax.pcast(zero[0], AXIS, to="varying"), zero[1])
            total, _ = jax.lax.scan(add_part, zero, parts)
        tokens = inputs.size * jax.lax.axis_size(AXIS)
        return jax.tree.map(lambda x: x / tokens, jax.lax.psum(total, AXIS))

    rows = P(None, AXIS)
    return over_devices(on_device, mesh, (P(), rows, rows), P(), check_vma)


def make_train_step(
    forward: Forward,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    check_vma: bool = True,
) -> Callable:
    """(state, inputs, targets) -> (state, measures), compiled.

    measures, float32 scalars by name: `train_loss`, the mean of the batch; `grad_norm`, before
    clipping; `param_norm`, after the update.

    The state that goes in is used up. mesh: see `over_devices`.
    """
    loss_and_grad = make_loss_and_grad(forward, mesh, check_vma)

    def step(state: State, inputs, targets):
        loss, grad = loss_and_grad(state.params, inputs, targets)
        updates, optimizer_state = optimizer.update(grad, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        measures = {
            "train_loss": loss,
            "grad_norm": optax.tree.norm(grad),
            "param_norm": optax.tree.norm(params),
        }
        return State(state.step + 1, cast(Params, params), optimizer_state), measures

    return jax.jit(step, donate_argnums=0)
