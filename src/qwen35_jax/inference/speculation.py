"""Speculative decoding with the checkpoint's multi-token-prediction head.

The head drafts a few tokens, one pass of the main model looks at all of them, and the leading ones that plain decoding
would have drawn are kept, with one token more. What plain decoding draws at a step depends on the logits, the row's
seed and the step alone, so guesses are drawn with the same noise as the tokens they are for: the answer is that of
plain decoding with the same seed, whatever the head drafts, and nearly as many guesses hold as in any exact scheme. As
with any other change of a batch's shape, that is up to rounding: in bfloat16 a pass over several tokens may round a
logit another way than a pass over one, and where two tokens are within that of each other either may be drawn.

Source: the idea is Leviathan et al., "Fast inference from transformers via speculative decoding" (2023); drawing both
sides with the same Gumbel noise replaces its acceptance test. The head: DeepSeek-V3 technical report (2024), section
2.2.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache, init_draft_cache
from qwen35_jax.config import TextConfig
from qwen35_jax.errors import PromptError
from qwen35_jax.inference.rows import Allowed, Emission, Limits, Rows, draw_next, draw_tokens, rows_after
from qwen35_jax.inference.sampling import Sampling
from qwen35_jax.model import Parameters
from qwen35_jax.nn.text_model import TextModel
from qwen35_jax.ops.segments import is_real, last_real

HeadInput = Literal["final_norm", "residual"]
MOST_DRAFTS = 4


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How the head drafts.

    Attributes:
        drafts: tokens drafted for each pass of the main model, 1 to 4.
        head_input: which hidden value of the main model the head reads. `final_norm` is the one that the output head
            reads as well: the head's own output takes its place from the second draft on, and has gone through a norm
            too. `residual` is the value before that norm, as some implementations have it.
    """

    drafts: int = 2
    head_input: HeadInput = "final_norm"

    def __post_init__(self) -> None:
        whole = isinstance(self.drafts, int) and not isinstance(self.drafts, bool)
        if not whole or not 1 <= self.drafts <= MOST_DRAFTS:
            raise PromptError(f"drafts is {self.drafts!r}, expected a number from 1 to {MOST_DRAFTS}")
        if self.head_input not in ("final_norm", "residual"):
            raise PromptError(f"head_input is {self.head_input!r}, expected 'final_norm' or 'residual'")


def require_head(parameters: Parameters) -> None:
    """Raises `PromptError` where a model has come without the multi-token-prediction head."""
    if "mtp" not in parameters:
        raise PromptError(
            "speculation needs the multi-token-prediction head, and this model was loaded without one: "
            "load(..., mtp=True), if its checkpoint has mtp.* tensors"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """What the head remembers and guesses.

    Attributes:
        cache: the head's keys and values, for one token less than the main model has consumed and drawn.
        hidden: what the head reads of each row's last consumed token.
        tokens: guesses for the tokens after `Rows.token`.
        head_input: see `Speculation`.
    """

    cache: Cache
    hidden: Float[Array, "batch embed"]
    tokens: Int[Array, "batch drafts"]
    head_input: HeadInput = dataclasses.field(metadata={"static": True})


def init_draft(
    config: TextConfig, speculation: Speculation, *, batch: int, capacity: int, dtype: DTypeLike
) -> Draft:
    """The draft of rows that have consumed nothing. Arguments as for `init_cache`."""
    return Draft(
        cache=init_draft_cache(config, batch=batch, capacity=capacity, dtype=dtype),
        hidden=jnp.zeros((batch, config.hidden_size), dtype),
        tokens=jnp.zeros((batch, speculation.drafts), jnp.int32),
        head_input=speculation.head_input,
    )


def prefill_head(
    model: TextModel,
    draft: Draft,
    residual: Float[Array, "batch time embed"],
    hidden: Float[Array, "batch time embed"],
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
    starts: Bool[Array, "batch"],
) -> Draft:
    """Shows the head a piece of every prompt that the main model has just consumed.

    Args:
        residual: the main model's values before its final norm.
        hidden: those after it.
        tokens: of the piece.
        segment_ids: 0 marks padding.
        starts: rows whose piece is the first of their prompt. Its first token has none before it.
    """
    read = hidden if draft.head_input == "final_norm" else residual
    real = is_real(segment_ids)
    first = real & (jnp.cumsum(real, axis=1) == 1)
    before = jnp.where(first[..., None], draft.hidden[:, None], jnp.roll(read, 1, axis=1))
    _, cache = model.draft(before, tokens, draft.cache, jnp.where(first & starts[:, None], 0, segment_ids))
    return dataclasses.replace(draft, cache=cache, hidden=_last(read, real, otherwise=draft.hidden))


def first_guesses(model: TextModel, draft: Draft, rows: Rows, sampling: Sampling, limits: Limits) -> Draft:
    """Guesses for the tokens after the first one of every answer."""
    active = rows.active[:, None].astype(jnp.int32)
    drafted, cache = model.draft(draft.hidden[:, None], rows.token[:, None], draft.cache, active)
    return _guess(model, dataclasses.replace(draft, cache=cache), drafted[:, 0], rows, sampling, limits)


def speculative_step(
    model: TextModel,
    cache: Cache,
    draft: Draft,
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
    allowed: Allowed | None,
) -> tuple[Cache, Draft, Rows, Emission]:
    """One pass of the main model over each row's last token and the guesses after it, then new guesses.

    Returns:
        Cache and draft after the tokens that count, the rows, and the emissions [position batch]: as many as there are
        guesses and one more, of which those that a row did not reach are not `emitted`.
    """
    tokens = jnp.concatenate([rows.token[:, None], draft.tokens], axis=1)
    segment_ids = jnp.broadcast_to(rows.active[:, None], tokens.shape).astype(jnp.int32)
    residual, updates = model.residual(tokens, None, segment_ids, cache, tentative=True)
    assert updates is not None
    hidden = model.normed(residual)
    rows, consumed, emissions = _draw_while_guesses_hold(
        model.logits(hidden), draft.tokens, rows, sampling, limits, allowed
    )
    cache = cache.extended(updates, consumed)

    read = hidden if draft.head_input == "final_norm" else residual
    drafted, head_cache = model.draft(read, emissions.token.T, draft.cache, consumed.astype(jnp.int32))
    draft = dataclasses.replace(draft, cache=head_cache, hidden=_last(read, consumed, otherwise=draft.hidden))
    draft = _guess(model, draft, _last(drafted, consumed, otherwise=draft.hidden), rows, sampling, limits)
    return cache, draft, rows, emissions


def _draw_while_guesses_hold(
    logits: Float[Array, "batch position vocab"],
    guesses: Int[Array, "batch drafts"],
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
    allowed: Allowed | None = None,
) -> tuple[Rows, Bool[Array, "batch position"], Emission]:
    """Draws at every position what plain decoding would if the guesses before it hold, and keeps what they do hold for.

    A row with a grammar draws once: what it may draw next is not known yet.

    Returns:
        The rows, which of the pass's tokens were consumed, and the emissions [position batch].
    """
    ahead = _rows_ahead(rows, guesses)

    def draw_position(logits: Array, step: Array, seen: Array, counts: Array) -> Emission:
        here = rows._replace(step=step, seen=seen, counts=counts)
        return draw_tokens(logits, here, sampling, limits, allowed)

    drawn = jax.vmap(draw_position)(jnp.moveaxis(logits, 1, 0), ahead.step, ahead.seen, ahead.counts)
    may_go_on = rows.active if allowed is None else rows.active & ~allowed.constrained
    goes_on = may_go_on & ~drawn.stopped & (ahead.step + 1 < limits.max_new_tokens)
    holds = goes_on[:-1] & (drawn.token[:-1] == guesses.T)
    reached = jnp.concatenate([rows.active[None], jnp.cumprod(holds, axis=0).astype(bool)])
    emissions = drawn._replace(
        token=jnp.where(reached, drawn.token, limits.pad_id),
        emitted=reached,
        stopped=drawn.stopped & reached,
        finite=drawn.finite | ~reached,
    )
    return rows_after(rows, emissions, limits), reached.T, emissions


def _rows_ahead(rows: Rows, guesses: Int[Array, "batch drafts"]) -> Rows:
    """The rows at each position of a pass, if all guesses before it hold: `step`, `seen` and `counts` by position."""
    drafts = guesses.shape[1]
    position = jnp.arange(drafts + 1)
    is_guess = guesses[..., None] == jnp.arange(rows.seen.shape[-1])
    before = (position[:, None] > jnp.arange(drafts))[:, None, :, None]
    guessed = jnp.sum(before & is_guess, axis=2, dtype=rows.counts.dtype)
    return rows._replace(
        step=rows.step + position[:, None],
        seen=rows.seen | (guessed > 0),
        counts=rows.counts + guessed,
    )


def _guess(
    model: TextModel,
    draft: Draft,
    hidden: Float[Array, "batch embed"],
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
) -> Draft:
    """The draft with new guesses, each drawn as the token it is for will be.

    The head reads its own output in the place of the hidden values that the main model has yet to compute. What it
    remembers of guesses is forgotten: their slots lie beyond the cache's lengths, and are written again.
    """
    lengths = draft.cache.lengths
    active = rows.active[:, None].astype(jnp.int32)

    def guess_one(
        carry: tuple[Array, Cache, Rows], _: None
    ) -> tuple[tuple[Array, Cache, Rows], Int[Array, "batch"]]:
        hidden, cache, rows = carry
        hidden, cache = model.draft(hidden[:, None], rows.token[:, None], cache, active)
        rows, emission = draw_next(model.logits(hidden[:, 0]), rows, sampling, limits)
        return (hidden[:, 0], cache, rows), emission.token

    rows, first = draw_next(model.logits(hidden), rows, sampling, limits)
    (_, cache, _), others = jax.lax.scan(
        guess_one, (hidden, draft.cache, rows), None, length=draft.tokens.shape[1] - 1
    )
    return dataclasses.replace(
        draft,
        cache=dataclasses.replace(cache, lengths=lengths),
        tokens=jnp.concatenate([first.token[None], others]).T,
    )


def _last(
    values: Float[Array, "batch time embed"],
    counts: Bool[Array, "batch time"],
    *,
    otherwise: Float[Array, "batch embed"],
) -> Float[Array, "batch embed"]:
    """The value at each row's last token that counts; rows without one keep `otherwise`."""
    at = last_real(counts.astype(jnp.int32))
    found = jnp.take_along_axis(values, at[:, None, None], axis=1)[:, 0]
    return jnp.where(counts.any(axis=1)[:, None], found, otherwise)
