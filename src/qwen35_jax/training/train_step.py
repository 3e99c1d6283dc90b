"""One optimizer step as a pure function: gradients over micro-batches, the guard, the update."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.model import Parameters
from qwen35_jax.nn.parameter import compute_dtype_for_state
from qwen35_jax.training.objective import (
    Batch,
    Measures,
    Objective,
    Totals,
    batch_loss,
    totals_of,
)


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        step: optimizer steps done.
        parameters: in the dtype in which they are updated, float32 as a rule, whatever the model computes in.
        optimizer: state of the optimizer.
    """

    step: Int[Array, ""]
    parameters: Parameters
    optimizer: optax.OptState


class StepReport(NamedTuple):
    """What a step tells.

    Attributes:
        measures: of its batch, before the update.
        targets: weights of the tokens that were to be predicted, all together.
        gradient_norm: of all gradients together, before clipping.
        finite: for each parameter, in the order of `jax.tree.leaves`, whether its gradient held neither NaN nor
            infinity. Where one did, the step has changed nothing.
    """

    measures: Measures
    targets: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    finite: Bool[Array, "parameters"]


def init_train_state(parameters: Parameters, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. What the optimizer keeps of a parameter lies on the devices where that does."""
    return TrainState(jnp.int32(0), parameters, jax.jit(optimizer.init)(parameters))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="state")
def train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, StepReport]:
    """Moves the parameters by one step.

    Args:
        graphdef: of the model, whose dtype is that of the computation.
        optimizer: from `make_optimizer`.
        objective: what is minimized.
        state: is donated: use the returned one.
        batch: [micro_batches batch time]. Gradients are summed over the micro-batches, one at a time in memory, and
            divided by the targets of all of them: how a step is split into micro-batches changes nothing.

    Returns:
        The state after the step, and what is told of it. A step with a gradient that is not finite moves nothing: it
        returns the state that came in.
    """
    totals = totals_of(batch)
    gradients, measures = _gradients(state.parameters, graphdef, batch, totals, objective)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)])
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
    parameters: Any = optax.apply_updates(state.parameters, updates)
    moved = TrainState(state.step + 1, parameters, optimizer_state)
    report = StepReport(measures, totals.next_token, _norm(gradients), finite)
    return jax.tree.map(functools.partial(jnp.where, finite.all()), moved, state), report


def _gradients(
    parameters: Parameters, graphdef: nnx.GraphDef, batch: Batch, totals: Totals, objective: Objective
) -> tuple[Parameters, Measures]:
    """Gradients and measures of the whole step. Sums over micro-batches are in float32 at least."""

    def share(micro_batch: Batch) -> tuple[Parameters, Measures]:
        return jax.grad(batch_loss, has_aux=True)(parameters, graphdef, micro_batch, totals, objective)

    one = jax.tree.map(lambda array: array[0], batch)
    if batch.tokens.shape[0] == 1:  # nothing is held beside the gradients
        return share(one)
    nothing = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, compute_dtype_for_state(shape.dtype)), jax.eval_shape(share, one)
    )
    sums, _ = jax.lax.scan(
        lambda sums, micro_batch: (jax.tree.map(jnp.add, sums, share(micro_batch)), None), nothing, batch
    )
    return sums


def _norm(tree: Any) -> Float[Array, ""]:
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
