"""How likely a model finds given tokens: log-probabilities for perplexities and for choosing among answers.

Rows are read in pieces of a few padded lengths, as prompts of a generation are, so that their lengths compile nothing
anew and a row may fill the whole context. The output head sees only tokens that are asked for, in blocks.
Continuations of one context share it: the context is read once, and each of them starts from its memory, the
recurrent states included.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.errors import NonFiniteError, PromptError
from qwen35_jax.inference.buckets import Chunk, cache_capacity, prefill_chunks
from qwen35_jax.inference.cache_rows import empty_cache, take_rows
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import most_likely
from qwen35_jax.model import Parameters
from qwen35_jax.nn.text_model import TextModel

NOT_SCORED = -1
LOGITS_IN_A_BLOCK = 2**25
"""Logits that are held at a time: 128 MiB in float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Continuation:
    """Tokens to be scored, after a context.

    Attributes:
        context: ids before them, at least one: nothing predicts the first token of all.
        tokens: the ids to be scored, at least one.
    """

    context: Sequence[int] | Int[np.ndarray, " context"]
    tokens: Sequence[int] | Int[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenScores:
    """What a model says about the tokens of a `Continuation`.

    Attributes:
        logprobs: natural logarithms of their probabilities, each given all tokens before it.
        greedy: whether greedy decoding would draw them there.
    """

    logprobs: Float[np.ndarray, " tokens"]
    greedy: Bool[np.ndarray, " tokens"]

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return float(self.logprobs.sum(dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class ScoringResult:
    """The scores, in the order of the continuations, and how long they took.

    Attributes:
        scores: of each continuation.
        read_tokens: that the model ran over, padding not counted.
        seconds: wall-clock time without that of the next.
        compile_seconds: tracing and compiling; about nothing once the programs exist.
    """

    scores: tuple[TokenScores, ...]
    read_tokens: int
    seconds: float
    compile_seconds: float


def score(
    model: RunnableModel,
    continuations: Iterable[Continuation],
    *,
    batch: int = 8,
    on_scored: Callable[[int, TokenScores], None] = lambda number, scores: None,
) -> ScoringResult:
    """Log-probabilities of tokens after contexts.

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        continuations: of any lengths. Scores do not depend on what else is among them.
        batch: rows that run side by side, at most (over a mesh, filled up to what can be cut evenly).
        on_scored: called with the number and the scores of each continuation as they come, in any order.

    Raises:
        PromptError: a continuation has no context or no tokens, holds bad ids, or is longer than the model's context.
            Raised before anything is compiled.
        NonFiniteError: the model's logits hold NaN or infinity.
    """
    if batch < 1:
        raise PromptError(f"batch is {batch}, expected a whole number of at least 1")
    text = model.config.text
    checked = [
        _checked(f"continuation {number}", continuation, text.vocab_size, text.max_context)
        for number, continuation in enumerate(continuations)
    ]
    # A few powers of two, so that calls with few continuations share their programs.
    rows = min(batch, 1 << (len(checked) - 1).bit_length()) if checked else 1
    return _Run(model, rows, on_scored).over(_waves(checked, batch))


def _checked(name: str, continuation: Continuation, vocab_size: int, context: int) -> Continuation:
    parts = {}
    for part in ("context", "tokens"):
        ids = np.asarray(getattr(continuation, part))
        if ids.ndim != 1 or not ids.size:
            raise PromptError(
                f"{name}: its {part} have shape {ids.shape}, expected a list of at least one id"
            )
        if not np.issubdtype(ids.dtype, np.integer):
            raise PromptError(f"{name}: its {part} are {ids.dtype}, expected whole numbers")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise PromptError(
                f"{name}: its {part} hold {outside[0]}, expected ids from 0 to {vocab_size - 1}"
            )
        parts[part] = ids.astype(np.int32, copy=False)
    read = parts["context"].size + parts["tokens"].size - 1
    if read > context:
        raise PromptError(
            f"{name} has {read} tokens before its last one, but the model's context is {context}: shorten its context"
        )
    return Continuation(**parts)


class _Row(NamedTuple):
    """One continuation as the model reads it.

    Attributes:
        number: which it is.
        stem: which of its wave's stems it starts after, where there are stems.
        tokens: what is read.
        targets: the token after each that is read, or `NOT_SCORED`.
    """

    number: int
    stem: int
    tokens: Int[np.ndarray, " time"]
    targets: Int[np.ndarray, " time"]


class _Wave(NamedTuple):
    """Stems (contexts that continuations share), read side by side, and then the rows, piece by piece."""

    stems: list[Int[np.ndarray, " time"]]
    pieces: list[list[_Row]]

    def longest(self) -> int:
        """Tokens that a row of memory must have room for."""
        before = [stem.size for stem in self.stems] or [0]
        return max(before[row.stem] + row.tokens.size for piece in self.pieces for row in piece)


def _waves(continuations: Sequence[Continuation], batch: int) -> Iterator[_Wave]:
    """Arranges continuations so that a shared context is read once and rows of like lengths run together."""
    by_context: dict[bytes, list[int]] = {}
    for number, continuation in enumerate(continuations):
        by_context.setdefault(np.asarray(continuation.context).tobytes(), []).append(number)
    alone, shared = [], []
    for numbers in by_context.values():
        # The last token of a context is read by each row itself: it predicts the first one that is scored.
        stem = np.asarray(continuations[numbers[0]].context)[:-1]
        if len(numbers) > 1 and stem.size:
            shared.append((stem, [_row(number, continuations[number], stem.size) for number in numbers]))
        else:
            alone += [_row(number, continuations[number], 0) for number in numbers]
    for piece in _pieces(sorted(alone, key=_longest_first), batch):
        yield _Wave([], [piece])
    for group in _pieces(sorted(shared, key=lambda pair: -pair[0].size), batch):
        rows = [row._replace(stem=index) for index, (_, rows) in enumerate(group) for row in rows]
        yield _Wave([stem for stem, _ in group], list(_pieces(sorted(rows, key=_longest_first), batch)))


def _row(number: int, continuation: Continuation, stem: int) -> _Row:
    context, tokens = np.asarray(continuation.context), np.asarray(continuation.tokens)
    read = np.concatenate([context[stem:], tokens[:-1]])
    targets = np.full(read.size, NOT_SCORED, np.int32)
    targets[-tokens.size :] = tokens
    return _Row(number, 0, read, targets)


def _longest_first(row: _Row) -> int:
    return -row.tokens.size


def _pieces(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


class _Run:
    """One call of `score`."""

    def __init__(self, model: RunnableModel, rows: int, on_scored: Callable[[int, TokenScores], None]):
        self.model = model
        self.placement = Placement.beside(model.parameters)
        self.rows = self.placement.filled_rows(rows)
        self.on_scored = on_scored
        self.compiled: set[tuple[int, ...]] = set()
        self.compile_seconds = 0.0
        self.read_tokens = 0

    def over(self, waves: Iterable[_Wave]) -> ScoringResult:
        begin = time.perf_counter()
        scores = dict(scored for wave in waves for scored in self._wave(wave))
        return ScoringResult(
            scores=tuple(scores[number] for number in range(len(scores))),
            read_tokens=self.read_tokens,
            seconds=time.perf_counter() - begin - self.compile_seconds,
            compile_seconds=self.compile_seconds,
        )

    def _wave(self, wave: _Wave) -> Iterator[tuple[int, TokenScores]]:
        capacity = cache_capacity(wave.longest(), self.model.config.text.max_context)
        stems = None
        if wave.stems:
            not_scored = [np.full_like(stem, NOT_SCORED) for stem in wave.stems]
            stems, _ = self._read(self._empty_cache(capacity), wave.stems, not_scored)
        for piece in wave.pieces:
            if stems is None:
                cache = self._empty_cache(capacity)
            else:
                chosen = np.zeros(self.rows, np.int32)
                chosen[: len(piece)] = [row.stem for row in piece]
                cache = _copied_rows(self.placement, stems, self.placement.put(chosen))
            parts = self._read(cache, [row.tokens for row in piece], [row.targets for row in piece])[1]
            logprobs, greedy = (
                np.concatenate(arrays, axis=1) for arrays in zip(*jax.device_get(parts), strict=True)
            )
            for index, row in enumerate(piece):
                asked = np.flatnonzero(row.targets != NOT_SCORED)
                scores = TokenScores(logprobs[index, asked], greedy[index, asked])
                if not np.isfinite(scores.logprobs).all():
                    raise NonFiniteError(
                        f"continuation {row.number}: the model's logits hold NaN or infinity; "
                        "look at the weights, or run in float32"
                    )
                self.on_scored(row.number, scores)
                yield row.number, scores

    def _empty_cache(self, capacity: int) -> Cache:
        return empty_cache(self.model, self.placement, batch=self.rows, capacity=capacity)

    def _read(
        self,
        cache: Cache,
        tokens: Sequence[Int[np.ndarray, " time"]],
        targets: Sequence[Int[np.ndarray, " time"]],
    ) -> tuple[Cache, list[Scores]]:
        """Runs the model over rows, piece by piece; gives the memory after them, and their scores on the device."""
        self.read_tokens += sum(row.size for row in tokens)
        parts = []
        for chunk in prefill_chunks(max(row.size for row in tokens)):
            shape = (self.rows, chunk.padded_length)
            arguments = (
                self.model.graphdef,
                self.placement,
                self.model.parameters,
                cache,
                *self.placement.put(
                    (
                        _padded(tokens, chunk, shape, fill=0),
                        _padded([np.ones_like(row) for row in tokens], chunk, shape, fill=0),
                        _padded(targets, chunk, shape, fill=NOT_SCORED),
                    )
                ),
            )
            self._compile((cache.capacity, *shape), arguments)
            cache, part = _score_chunk(*arguments)
            parts.append(jax.tree.map(lambda array, chunk=chunk: array[:, : chunk.stop - chunk.start], part))
        return cache, parts

    def _compile(self, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Has the program ready before the clock that counts; the call finds it by its arguments' shapes."""
        if shape in self.compiled:
            return
        begin = time.perf_counter()
        _score_chunk.lower(*arguments).compile()
        self.compile_seconds += time.perf_counter() - begin
        self.compiled.add(shape)


def _padded(
    rows: Sequence[Int[np.ndarray, " time"]], chunk: Chunk, shape: tuple[int, int], *, fill: int
) -> Int[np.ndarray, "batch time"]:
    """What lies in a chunk of each row, padded on the right."""
    padded = np.full(shape, fill, np.int32)
    for index, row in enumerate(rows):
        piece = row[chunk.start : chunk.stop]
        padded[index, : piece.size] = piece
    return padded


Scores = tuple[Float[Array, "batch time"], Bool[Array, "batch time"]]
"""Log-probabilities of targets, and whether each is the most likely token; of no meaning where nothing is asked."""


@functools.partial(jax.jit, static_argnums=0)
def _copied_rows(placement: Placement, cache: Cache, rows: Int[Array, " batch"]) -> Cache:
    return placement.keep(take_rows(cache, rows))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="cache")
def _score_chunk(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    cache: Cache,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
    targets: Int[Array, "batch time"],
) -> tuple[Cache, Scores]:
    """Consumes the next piece of every row, and tells how likely the targets are after its tokens."""
    model = nnx.merge(graphdef, parameters)
    hidden, cache = model(tokens, segment_ids=segment_ids, cache=cache)
    return placement.keep((cache, _target_scores(model, hidden, targets)))


def _target_scores(
    model: TextModel, hidden: Float[Array, "batch time embed"], targets: Int[Array, "batch time"]
) -> Scores:
    """Scores of targets, block by block over time; a block without any does not meet the output head."""
    batch, time = targets.shape
    block = time
    vocabulary_size = model.embed_tokens.weight.shape[0]
    while block % 2 == 0 and batch * block * vocabulary_size > LOGITS_IN_A_BLOCK:
        block //= 2

    def blocks(array: Array) -> Array:
        return jnp.moveaxis(array.reshape(batch, time // block, block, *array.shape[2:]), 1, 0)

    def scored(hidden: Float[Array, "batch block embed"], targets: Int[Array, "batch block"]) -> Scores:
        logits = model.logits(hidden)
        of_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return of_target - jax.nn.logsumexp(logits, axis=-1), most_likely(logits) == targets

    def one(piece: tuple[Array, Array]) -> Scores:
        hidden, targets = piece
        nothing = jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(scored, hidden, targets)
        )
        return jax.lax.cond((targets != NOT_SCORED).any(), scored, lambda *_: nothing, hidden, targets)

    found = jax.lax.map(one, (blocks(hidden), blocks(targets)))
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1).reshape(batch, time), found)
