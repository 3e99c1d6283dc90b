"""One optimizer step as a pure function: gradients over micro-batches, the guard, the update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from qwen35_jax.model import Parameters
from qwen35_jax.nn.parameter import compute_dtype_for_state


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        step: optimizer steps done.
        parameters: that are trained, in the dtype in which they are updated, float32 as a rule, whatever the model
            computes in.
        optimizer: state of the optimizer.
        key: of everything random in a step. It stays the same: a step folds its own number into it, so a run that is
            resumed draws what an undisturbed one does.
    """

    step: Int[Array, ""]
    parameters: Parameters
    optimizer: optax.OptState
    key: Key[Array, ""]


class ParametersOf(Protocol):
    """How a model's parameters are made of those that are trained and those that are not.

    It is static under `jax.jit`: hashable, and equal to another that makes the same.
    """

    def __call__(
        self, trained: Parameters, frozen: Parameters | None, key: Key[Array, ""] | None
    ) -> Parameters:
        """The parameters of one micro-batch, differentiable in `trained`; without a key, nothing in them is random."""
        ...


def all_trained(trained: Parameters, frozen: Parameters | None, key: Key[Array, ""] | None) -> Parameters:
    """Full fine-tuning: the model's parameters are those that are trained."""
    return trained


class StepObjective(Protocol):
    """What a step minimizes, as `qwen35_jax.training.objective.Objective` does.

    It is static under `jax.jit`: hashable, and equal to another that computes the same. Batches, totals and measures
    are named tuples of its own. A batch has `tokens` [micro_batches batch time] among its fields, and the first axis of
    all others is that of the micro-batches too.
    """

    def totals_of(self, batch: Any) -> Any:
        """What is summed over all of a step's batch before its loss: by this the parts of the loss are divided."""
        ...

    def loss(
        self, parameters: Parameters, graphdef: nnx.GraphDef, batch: Any, totals: Any
    ) -> tuple[Float[Array, ""], Any]:
        """A micro-batch's share of the loss of its step and of its measures, whose sums are those of the step."""
        ...


_Loss = Callable[[Parameters, Any, Int[Array, ""]], tuple[Float[Array, ""], Any]]


class StepReport(NamedTuple):
    """What a step tells.

    Attributes:
        measures: of its batch, before the update: those of the objective.
        totals: of its batch: what the objective divides by.
        gradient_norm: of all gradients together, before clipping.
        finite: for each parameter that is trained, in the order of `jax.tree.leaves`, whether its gradient held neither
            NaN nor infinity. Where one did, the step has changed nothing.
    """

    measures: Any
    totals: Any
    gradient_norm: Float[Array, ""]
    finite: Bool[Array, "parameters"]


def init_train_state(
    parameters: Parameters, optimizer: optax.GradientTransformation, *, seed: int = 0
) -> TrainState:
    """The state before the first step, on one device.

    Over a mesh, `qwen35_jax.training.placement.place_train_state` makes it, and cuts what the optimizer keeps of a
    parameter as that is cut: left to the compiler, it would be whole on every device.
    """
    return TrainState(jnp.int32(0), parameters, jax.jit(optimizer.init)(parameters), jax.random.key(seed))


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), static_argnames="parameters_of", donate_argnames="state"
)
def train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    objective: StepObjective,
    state: TrainState,
    batch: Any,
    frozen: Parameters | None = None,
    *,
    parameters_of: ParametersOf = all_trained,
) -> tuple[TrainState, StepReport]:
    """Moves the parameters that are trained by one step.

    Args:
        graphdef: of the model, whose dtype is that of the computation.
        optimizer: from `make_optimizer`.
        objective: what is minimized.
        state: is donated: use the returned one.
        batch: of the objective, its arrays with an axis of micro-batches first. Gradients are summed over these, one
            at a time in memory, and divided by the totals of all: how a step is split changes nothing, but what is
            random in it.
        frozen: parameters that no step moves. They are neither copied nor cast to another dtype.
        parameters_of: makes the model's parameters of both; by default all are trained.

    Returns:
        The state after the step, and what is told of it. A step with a gradient that is not finite moves nothing: it
        returns the state that came in.
    """
    totals = objective.totals_of(batch)
    key = jax.random.fold_in(state.key, state.step)

    def loss(trained: Parameters, micro_batch: Any, index: Int[Array, ""]) -> tuple[Float[Array, ""], Any]:
        parameters = parameters_of(trained, frozen, jax.random.fold_in(key, index))
        return objective.loss(parameters, graphdef, micro_batch, totals)

    gradients, measures = _gradients(loss, state.parameters, batch)
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)])
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
    parameters: Any = optax.apply_updates(state.parameters, updates)
    moved = TrainState(state.step + 1, parameters, optimizer_state, state.key)
    report = StepReport(measures, totals, _norm(gradients), finite)
    return jax.tree.map(functools.partial(jnp.where, finite.all()), moved, state), report


def _gradients(loss: _Loss, trained: Parameters, batch: Any) -> tuple[Parameters, Any]:
    """Gradients and measures of the whole step. Sums over micro-batches are in float32 at least."""

    def share(micro_batch: Any, index: Int[Array, ""]) -> tuple[Parameters, Any]:
        return jax.grad(loss, has_aux=True)(trained, micro_batch, index)

    count = batch.tokens.shape[0]
    first = jax.tree.map(lambda array: array[0], batch), jnp.int32(0)
    if count == 1:  # nothing is held beside the gradients
        return share(*first)
    nothing = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, compute_dtype_for_state(shape.dtype)),
        jax.eval_shape(share, *first),
    )
    sums, _ = jax.lax.scan(
        lambda sums, scanned: (jax.tree.map(jnp.add, sums, share(*scanned)), None),
        nothing,
        (batch, jnp.arange(count)),
    )
    return sums


def _norm(tree: Any) -> Float[Array, ""]:
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
