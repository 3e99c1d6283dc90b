"""The last stage of nano's training: its multi-token-prediction head alone learns to draft several tokens ahead.

In the training of the whole model the head only ever reads the main model's hidden values. When it drafts, it reads its
own output from the second draft on (see `qwen35_jax.inference.speculation`), and it is asked about what the main model
says, not about what a corpus says. So here it drafts as it does at run time, from every token of rows that the main
model has continued, and learns the main model's own distribution. The main model is not touched.

Source: the idea of training a draft head on its own drafts is Li et al., "EAGLE-3" (2025), section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import most_likely
from qwen35_jax.model import Parameters
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import DecoderLayer
from qwen35_jax.nn.gated_attention import GatedAttention
from qwen35_jax.nn.projection import merge_heads
from qwen35_jax.nn.text_model import TextModel
from qwen35_jax.sharding import parameter_axes
from qwen35_jax.training.optimizers import OptimizerSettings, make_optimizer
from scripts.build_nano.continuations import Continuations


@dataclasses.dataclass(frozen=True)
class Round:
    """How long and how fast the head learns.

    Attributes:
        steps: of the optimizer.
        rows: of a step.
        optimizer: see there.
    """

    steps: int
    rows: int
    optimizer: OptimizerSettings


OPTIMIZER = OptimizerSettings(
    name="muon",
    learning_rate=0.01,
    adam_learning_rate=0.002,
    schedule="linear",
    warmup_steps=40,
    decay_steps=450,
    beta2=0.98,
    weight_decay=0.01,
)
ROUNDS = (
    Round(steps=600, rows=8, optimizer=OPTIMIZER),
    Round(steps=400, rows=8, optimizer=dataclasses.replace(OPTIMIZER, decay_steps=360)),
)
"""One after the other: the rates rise again at the start of each."""
DRAFT_WEIGHTS = (1.0, 0.8, 0.6, 0.5)
"""Of the loss of each draft: a later one counts only where those before it held."""

Hidden = Float[Array, "batch pairs embed"]
KeysAndValues = tuple[
    Float[Array, "batch pairs kv_heads head_dim"], Float[Array, "batch pairs kv_heads head_dim"]
]


def drafted_ahead(
    model: TextModel,
    hidden: Float[Array, "batch time embed"],
    tokens: Int[Array, "batch time"],
    drafts: int,
) -> list[Hidden]:
    """What the head makes of every token and the one after it, as each of the drafts of a pass.

    Args:
        model: with the head.
        hidden: of the main model, after its final norm.
        tokens: of one document a row, without padding.
        drafts: how many.

    Returns:
        For each draft k, counted from 0, values for the output head: at pair i, of tokens i and i + 1, for token
        i + 2. It is what the head gives after it has read the main model's hidden values up to token i - k, and its
        own output after that; the first k pairs have no such past, and mean nothing.
    """
    head = model.mtp
    embedded = head.embedding_norm(model.embed(tokens[:, 1:]))
    positions = jnp.broadcast_to(jnp.arange(1, tokens.shape[1]), (tokens.shape[0], tokens.shape[1] - 1))
    context = model.context(tokens[:, 1:], positions, None, None)
    read, remembered, results = hidden[:, :-1], [], []
    for _ in range(drafts):
        pair = jnp.stack([embedded, head.hidden_norm(read)], axis=2)
        x, keys_and_values = _layer(head.layer, merge_heads(pair, head.fc_weight[...]), context, remembered)
        remembered.append(keys_and_values)
        results.append(head.norm(x))
        read = _later(results[-1], 1)
    return results


def _layer(
    layer: DecoderLayer, x: Hidden, context: TokenContext, remembered: list[KeysAndValues]
) -> tuple[Hidden, KeysAndValues]:
    """The head's layer as draft number `len(remembered)`, and its keys and values."""
    attention = layer.mixer
    assert isinstance(attention, GatedAttention)
    q, gate, k, v = attention.qkv_proj(layer.input_norm(x))
    q, k = attention.rope(*attention.qk_norm(q, k), context)
    o = _attention_over_drafts(q, [*remembered, (k, v)])
    x = x + attention.o_proj(attention.gate(o, gate))
    return x + layer.mlp(layer.post_attn_norm(x)), (k, v)


def _attention_over_drafts(
    q: Float[Array, "batch pairs heads head_dim"], remembered: list[KeysAndValues]
) -> Float[Array, "batch pairs heads head_dim"]:
    """Attention of the last of the drafts: over the first draft's pairs as far as the main model has been read, and
    after that over one pair of each later draft.
    """
    (first_k, first_v), *later = remembered
    pairs, groups = q.shape[1], q.shape[2] // first_k.shape[2]
    grouped = q.reshape(*q.shape[:2], first_k.shape[2], groups, q.shape[3]) * q.shape[3] ** -0.5
    known = jnp.arange(pairs)[:, None] - len(later) >= jnp.arange(pairs)
    scores = [jnp.where(known, jnp.einsum("btgrd,bsgd->bgrts", grouped, first_k), -jnp.inf)]
    values = []
    for ago, (k, v) in zip(reversed(range(len(later))), later, strict=True):
        scores.append(jnp.einsum("btgrd,btgd->bgrt", grouped, _later(k, ago))[..., None])
        values.append(_later(v, ago))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    o = jnp.einsum("bgrts,bsgd->btgrd", weights[..., :pairs], first_v)
    for number, v in enumerate(values):
        o += jnp.einsum("bgrt,btgd->btgrd", weights[..., pairs + number], v)
    return o.reshape(q.shape)


def _later(values: Float[Array, "batch pairs ..."], by: int) -> Float[Array, "batch pairs ..."]:
    """Every value moved to a pair so many later; zeros come in at the front."""
    return jnp.pad(values, ((0, 0), (by, 0)) + ((0, 0),) * (values.ndim - 2))[:, : values.shape[1]]


def draft_loss(
    head: Parameters,
    main: Parameters,
    graphdef: nnx.GraphDef,
    tokens: Int[Array, "batch time"],
    begin: Int[Array, "batch"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross entropy of the main model's distribution and the head's, over what the main model has said.

    Args:
        head: the parameters to learn, those under `mtp`.
        main: all others.
        graphdef: of the model.
        tokens: of rows.
        begin: where what the main model says begins in each.

    Returns:
        The weighted sum over the drafts of their mean losses, and for each draft how often its first choice is the
        main model's.
    """
    model = nnx.merge(graphdef, main | {"mtp": head})
    hidden, _ = model(tokens)
    hidden = jax.lax.stop_gradient(hidden)
    expected = model.logits(hidden[:, 1:])
    probabilities = jax.nn.softmax(expected)
    pairs = jnp.arange(tokens.shape[1] - 1)
    total, measures = jnp.float32(0.0), {}
    for ago, drafted in enumerate(drafted_ahead(model, hidden, tokens, len(DRAFT_WEIGHTS))):
        logits = model.logits(drafted)
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * probabilities, axis=-1)
        # The main model has been read up to a token that it said itself, or the last one it was given.
        counts = (pairs - ago >= begin[:, None] - 1).astype(losses.dtype)
        total += DRAFT_WEIGHTS[ago] * jnp.sum(losses * counts) / jnp.sum(counts)
        held = most_likely(logits) == most_likely(expected)
        measures[f"draft_{ago + 1}"] = jnp.sum(held * counts) / jnp.sum(counts)
    return total, measures | {"loss": total}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def draft_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    head: Parameters,
    optimizer_state: optax.OptState,
    main: Parameters,
    tokens: Int[Array, "batch time"],
    begin: Int[Array, "batch"],
) -> tuple[Parameters, optax.OptState, dict[str, Float[Array, ""]]]:
    """One step down, of the head alone."""
    gradients, measures = jax.grad(draft_loss, has_aux=True)(head, main, graphdef, tokens, begin)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, head)
    return cast(Parameters, optax.apply_updates(head, updates)), optimizer_state, measures


def with_trained_head(
    model: RunnableModel,
    rows: Continuations,
    *,
    rounds: Sequence[Round],
    seed: int,
    note: Callable[..., None],
) -> Parameters:
    """The model's parameters with a head that has learned from rows; all others are the very same arrays.

    Args:
        model: in float32, its head the one to start from.
        rows: what the model has said. Every epoch takes them in another order.
        rounds: how long and how fast, one after the other.
        seed: of the orders.
        note: told of the progress.
    """
    main = {name: part for name, part in model.parameters.items() if name != "mtp"}
    head = jax.tree.map(jnp.array, model.parameters["mtp"])  # a copy, for steps donate it
    axes = parameter_axes(model.graphdef, model.parameters)["mtp"]
    rng = np.random.default_rng(seed)
    order = np.empty(0, np.int64)
    for number, each in enumerate(rounds, start=1):
        optimizer = make_optimizer(each.optimizer, axes, steps=each.steps)
        optimizer_state = optimizer.init(head)
        for step in range(each.steps):
            if len(order) < each.rows:
                order = rng.permutation(len(rows.tokens))
            here, order = order[: each.rows], order[each.rows :]
            head, optimizer_state, measures = draft_step(
                model.graphdef, optimizer, head, optimizer_state, main, rows.tokens[here], rows.begin[here]
            )
            if step % 20 == 0:
                measured = {name: float(value) for name, value in measures.items()}
                note(head_round=number, head_step=step, **measured)
    return main | {"mtp": head}
