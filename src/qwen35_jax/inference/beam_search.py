"""Beam search: the likeliest answers that a fixed number of candidates, kept side by side, comes upon."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.errors import NonFiniteError, PromptError
from qwen35_jax.inference.buckets import cache_capacity, prefill_chunks
from qwen35_jax.inference.cache_rows import empty_cache, take_rows
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.prompts import Prompt, check_prompts
from qwen35_jax.inference.rows import STOP_ID_SLOTS, drawable_vocabulary
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.stop_tokens import parse_token_ids, stop_token_ids
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.model import Parameters, prefill

LEAST_ROOM = 16


@dataclasses.dataclass(frozen=True)
class Beam:
    """One answer.

    Attributes:
        tokens: a stop id at the end included.
        logprob: of all tokens together, as the model sees them.
        score: `logprob / len(tokens) ** length_penalty`, by which answers are compared.
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float


def beam_search(
    model: RunnableModel,
    prompt: Prompt,
    *,
    beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    stop_ids: Iterable[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Beam, ...]:
    """Searches for likely answers to one prompt.

    At every step each living beam is tried with every token. Those of the `beams` likeliest results that end with a
    stop id become answers, of which the best `beams` by score are kept; the `beams` likeliest of the others live on.
    The search ends when none of them can become better than the answers there are, or at `max_new_tokens`, where those
    that live are answers too. (These are the rules of `transformers` with `early_stopping="never"`.)

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        prompt: token ids, or a text where there is a tokenizer.
        beams: how many candidates live side by side, and answers come back at most.
        max_new_tokens: length of an answer at most.
        length_penalty: 0 compares answers by their log-probability, which favours short ones; 1 by its mean per
            token; more favours long ones.
        stop_ids: ids that end an answer; by default those that the checkpoint names, see `stop_token_ids`.
        tokenizer: of the model. Ids past its vocabulary are never drawn.

    Returns:
        The answers, best first.

    Raises:
        PromptError: the prompt is empty, holds bad ids or is too long for the context, or a number is out of range.
            Raised before anything is compiled.
        NonFiniteError: the model's logits hold NaN or infinity.
    """
    text = model.config.text
    if beams < 1:
        raise PromptError(f"beams is {beams}, expected at least 1")
    if not math.isfinite(length_penalty):
        raise PromptError(f"length_penalty is {length_penalty}, expected a finite number")
    (tokens,), _ = check_prompts([prompt], GenerationSettings(max_new_tokens=max_new_tokens), text, tokenizer)
    if stop_ids is None:
        stop_ids = stop_token_ids(model.folder, config_ids=text.eos_token_id, tokenizer=tokenizer)
    stops = parse_token_ids([*stop_ids], "stop_ids")
    padded = np.full(max(1, -(-len(stops) // STOP_ID_SLOTS)) * STOP_ID_SLOTS, -1, np.int32)
    padded[: len(stops)] = stops
    room = max(LEAST_ROOM, 1 << (max_new_tokens - 1).bit_length())

    placement = Placement.beside(model.parameters)
    capacity = cache_capacity(len(tokens) + max_new_tokens, text.max_context)
    cache = empty_cache(model, placement, batch=1, capacity=capacity)
    logits, cache = _after_prompt(model, tokens, cache)
    answers = jax.device_get(
        _search(
            model.graphdef,
            placement,
            model.parameters,
            cache,
            logits,
            _Rules(
                length_penalty=jnp.asarray(length_penalty, logits.dtype),
                max_new_tokens=jnp.int32(max_new_tokens),
                stop_ids=jnp.asarray(padded),
                vocabulary_size=jnp.int32(drawable_vocabulary(text.vocab_size, tokenizer)),
            ),
            beams=beams,
            room=room,
        )
    )
    if np.isnan(answers.score).any() or not np.isfinite(answers.score).any():
        raise NonFiniteError(
            "the model's logits hold NaN or infinity; look at the weights, or run in float32"
        )
    return tuple(
        Beam(tuple(row[:length].tolist()), float(logprob), float(score))
        for row, length, logprob, score in zip(*answers, strict=True)
        if np.isfinite(score)
    )


def _after_prompt(
    model: RunnableModel, prompt: list[int], cache: Cache
) -> tuple[Float[Array, "1 vocab"], Cache]:
    logits = None
    for chunk in prefill_chunks(len(prompt)):
        tokens, segment_ids = np.zeros((2, 1, chunk.padded_length), np.int32)
        tokens[0, : chunk.stop - chunk.start] = prompt[chunk.start : chunk.stop]
        segment_ids[0, : chunk.stop - chunk.start] = 1
        logits, cache = prefill(
            model.graphdef,
            model.parameters,
            jnp.asarray(tokens),
            cache,
            segment_ids=jnp.asarray(segment_ids),
        )
    assert logits is not None
    return logits, cache


class _Rules(NamedTuple):
    """Arguments of `beam_search` that compile nothing anew.

    Attributes:
        stop_ids: filled up with -1.
        vocabulary_size: ids from here on are never drawn.
    """

    length_penalty: Float[Array, ""]
    max_new_tokens: Int[Array, ""]
    stop_ids: Int[Array, " stops"]
    vocabulary_size: Int[Array, ""]


class _Answers(NamedTuple):
    """Answers, best first; a score of minus infinity says that there is none."""

    tokens: Int[Array, "beams room"]
    length: Int[Array, " beams"]
    logprob: Float[Array, " beams"]
    score: Float[Array, " beams"]


class _Living(NamedTuple):
    """Beams that have not ended, likeliest first.

    Attributes:
        parent: the row of the cache with all tokens but the last.
        tokens: drawn so far.
        logprob: of them together; minus infinity where there is no beam.
    """

    parent: Int[Array, " beams"]
    tokens: Int[Array, "beams room"]
    logprob: Float[Array, " beams"]


_Carry = tuple[Int[Array, ""], Cache, _Living, _Answers]


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("beams", "room"))
def _search(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    cache: Cache,
    logits: Float[Array, "1 vocab"],
    rules: _Rules,
    *,
    beams: int,
    room: int,
) -> _Answers:
    """The whole search, from the memory of the prompt and the logits after it."""
    model = nnx.merge(graphdef, parameters)

    def more(carry: _Carry) -> Bool[Array, ""]:
        drawn, _, living, answers = carry
        # A log-probability only falls, so the best score that a beam can still reach is at one of the ends.
        lengths = jnp.stack([drawn + 1, rules.max_new_tokens])
        reachable = _score(living.logprob[0], lengths, rules).max()
        return (drawn < rules.max_new_tokens) & (reachable > answers.score[-1])

    def step(carry: _Carry) -> _Carry:
        drawn, cache, living, answers = carry
        cache = take_rows(cache, living.parent)
        token = living.tokens[:, drawn - 1]
        hidden, cache = model(token[:, None], segment_ids=jnp.ones_like(token)[:, None], cache=cache)
        living, answers = _select(model.logits(hidden[:, 0]), drawn, living, answers, rules)
        return drawn + 1, *placement.keep((cache, living, answers))

    none = jnp.full(beams, -jnp.inf, logits.dtype)
    nothing = jnp.zeros(beams, jnp.int32)
    living = _Living(nothing, jnp.zeros((beams, room), jnp.int32), none.at[0].set(0.0))
    answers = _Answers(living.tokens, nothing, none, none)
    cache = take_rows(cache, nothing)
    logits = jnp.broadcast_to(logits, (beams, logits.shape[1]))
    living, answers = _select(logits, jnp.int32(0), living, answers, rules)
    start = (jnp.int32(1), *placement.keep((cache, living, answers)))
    drawn, _, living, answers = jax.lax.while_loop(more, step, start)
    cut_off = drawn == rules.max_new_tokens
    score = jnp.where(cut_off, _score(living.logprob, drawn, rules), -jnp.inf)
    length = jnp.full_like(answers.length, drawn)
    return _best(answers, _Answers(living.tokens, length, living.logprob, score))


def _select(
    logits: Float[Array, "beams vocab"],
    drawn: Int[Array, ""],
    living: _Living,
    answers: _Answers,
    rules: _Rules,
) -> tuple[_Living, _Answers]:
    """Continues every beam with every token and keeps the best, ended and living.

    Args:
        logits: after each living beam; row i is that of beam i.
        drawn: tokens of each beam so far.
    """
    beams, vocab = logits.shape
    logprobs = jnp.where(jnp.arange(vocab) < rules.vocabulary_size, jax.nn.log_softmax(logits), -jnp.inf)
    # Each beam may end in as many ways as there are stop ids: among so many, enough live on.
    candidates = min(beams * (1 + rules.stop_ids.size), beams * vocab)
    logprob, place = jax.lax.top_k((living.logprob[:, None] + logprobs).reshape(-1), candidates)
    parent, token = place // vocab, place % vocab
    tokens = living.tokens[parent].at[:, drawn].set(token)
    stopped = (token[:, None] == rules.stop_ids).any(axis=1)

    length = drawn + 1
    likely = jnp.arange(candidates) < beams
    score = jnp.where(stopped & likely, _score(logprob, length, rules), -jnp.inf)
    ended = _Answers(tokens, jnp.full_like(token, length), logprob, score)
    logprob, best = jax.lax.top_k(jnp.where(stopped, -jnp.inf, logprob), beams)
    return _Living(parent[best], tokens[best], logprob), _best(answers, ended)


def _best(answers: _Answers, others: _Answers) -> _Answers:
    """The best of both, as many as there are `answers`."""
    every = _Answers(*(jnp.concatenate(pair) for pair in zip(answers, others, strict=True)))
    _, best = jax.lax.top_k(every.score, answers.score.size)
    return _Answers(*(field[best] for field in every))


def _score(
    logprob: Float[Array, "*beams"], length: Int[Array, "*beams"], rules: _Rules
) -> Float[Array, "*beams"]:
    return logprob / length.astype(logprob.dtype) ** rules.length_penalty
