"""Generating text: prompts in, tokens and text out, streamed while they come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.answer import Answer
from qwen35_jax.inference.buckets import cache_capacity, prefill_chunks
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import (
    PASSES_IN_A_BLOCK,
    Memory,
    decode_block,
    empty_memory,
    first_token,
    prefill_chunk,
)
from qwen35_jax.inference.prompts import Prompt, as_rows, check_prompts
from qwen35_jax.inference.results import GenerationResult, Timing, TokenEvent
from qwen35_jax.inference.rows import drawable_vocabulary, fresh_rows, limits_of, part_of
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import stack_settings
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation, require_head
from qwen35_jax.inference.stop_tokens import parse_token_ids, stop_token_ids
from qwen35_jax.inference.tokenizer import FILE_NAME as TOKENIZER_FILE
from qwen35_jax.inference.tokenizer import Tokenizer


def generate(
    model: RunnableModel,
    prompts: Sequence[Prompt],
    settings: GenerationSettings | Sequence[GenerationSettings] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    stop_ids: Iterable[int] | None = None,
    on_token: Callable[[TokenEvent], None] | None = None,
    speculation: Speculation | None = None,
) -> GenerationResult:
    """Continues prompts, all in one batch.

    A row's answer does not depend on the rows beside it, nor on speculation. Greedy decoding is the default.

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        prompts: texts or lists of token ids, of any lengths.
        settings: one for all rows, or one per row.
        tokenizer: of the model; by default the one in the model's folder, if there is one. It is needed for texts and
            stop strings, and without one answers have no text. Ids past its vocabulary are never drawn.
        stop_ids: ids that end a row; by default those that the checkpoint names, see `stop_token_ids`.
        on_token: called for every token as it arrives.
        speculation: lets the model's multi-token-prediction head draft tokens; the model is loaded with `mtp=True`.

    Returns:
        Tokens, text and timing. The tokens are the same whether they are streamed or not.

    Raises:
        PromptError: a prompt is empty, holds bad ids or is too long for the context together with what is to be
            generated; or a setting needs a tokenizer and there is none; or speculation is asked of a model without
            the head. Raised before anything is compiled.
        NonFiniteError: the model's logits hold NaN or infinity.
    """
    rows = as_rows(prompts, settings)
    needs_text = any(isinstance(prompt, str) or wanted.stop for prompt, wanted in rows)
    if tokenizer is None and needs_text and model.folder is None:
        raise PromptError("texts and stop strings need a tokenizer, and this model comes without a folder")
    if (
        tokenizer is None
        and model.folder is not None
        and (needs_text or (Path(model.folder) / TOKENIZER_FILE).is_file())
    ):
        tokenizer = Tokenizer.from_folder(model.folder)
    tokens, per_row = check_prompts(prompts, settings, model.config.text, tokenizer)
    if stop_ids is None:
        stop_ids = stop_token_ids(
            model.folder, config_ids=model.config.text.eos_token_id, tokenizer=tokenizer
        )
    else:
        stop_ids = parse_token_ids([*stop_ids], "stop_ids")
    if speculation is not None:
        require_head(model.parameters)
    run = _Run(model, tokens, per_row, tokenizer, stop_ids, on_token or (lambda event: None), speculation)
    return run.result()


class _Run:
    """One call of `generate`: the device's state on one side, the rows' tokens and texts on the other."""

    def __init__(
        self,
        model: RunnableModel,
        prompts: list[list[int]],
        settings: list[GenerationSettings],
        tokenizer: Tokenizer | None,
        stop_ids: tuple[int, ...],
        on_token: Callable[[TokenEvent], None],
        speculation: Speculation | None,
    ):
        self.model = model
        self.speculation = speculation
        self.placement = Placement.beside(model.parameters)
        # Rows without a prompt fill the batch up to what can be cut over a mesh; they have ended from the start.
        self.asked = len(prompts)
        empty = self.placement.filled_rows(self.asked) - self.asked
        self.prompts = prompts + [[]] * empty
        settings = settings + [GenerationSettings(max_new_tokens=1)] * empty
        self.most = np.array([row.max_new_tokens for row in settings])
        stopping = [() if row.ignore_eos else stop_ids for row in settings]
        seeds = [secrets.randbits(32) if row.seed is None else row.seed for row in settings]
        self.answers = [
            Answer(
                prompts[row],
                settings[row],
                seed=seeds[row],
                tokenizer=tokenizer,
                stop_ids=stopping[row],
                listener=on_token,
                row=row,
            )
            for row in range(self.asked)
        ]
        self.compile_seconds = 0.0

        text = model.config.text
        self.sampling = stack_settings(settings, seeds)
        self.limits = limits_of(
            settings,
            stopping,
            vocab_size=text.vocab_size,
            drawable=drawable_vocabulary(text.vocab_size, tokenizer),
            pad_id=text.pad_token_id or 0,
        )

    def result(self) -> GenerationResult:
        static = self.model.graphdef, self.placement, self.model.parameters
        memory = self._empty()
        # Placed beside the parameters, so that jit sees the same in a program's first call and in later ones.
        settings = self.placement.put((self.sampling, self.limits))
        rows = self.placement.put(
            fresh_rows(self.prompts, self.model.config.text.vocab_size, self._going_on())
        )
        chunks = self.placement.put(list(self._padded_chunks()))
        keep = self._going_on()
        # Compiled before the clock starts; calls below find the programs by their arguments' shapes.
        for tokens, segment_ids in {tokens.shape: (tokens, ids) for tokens, ids in chunks}.values():
            self._compile(prefill_chunk, *static, memory, tokens, segment_ids)
        self._compile(first_token, *static, memory, rows, *settings)
        if keep.any():
            self._compile(decode_block, *static, memory, rows, keep, *settings)

        begin = time.perf_counter()
        for tokens, segment_ids in chunks:
            memory = prefill_chunk(*static, memory, tokens, segment_ids)
        memory, rows, first = first_token(*static, memory, rows, *settings)
        # The device runs one block ahead of the host: while tokens become text and are shown, the next ones are being
        # computed. Rows end on the device itself; only stop strings are told from here, and what a row draws after
        # its end is not looked at.
        following = None
        if keep.any():
            memory, rows, following = decode_block(*static, memory, rows, keep, *settings)
        first = jax.device_get(first)
        for row, answer in enumerate(self.answers):
            answer.take(part_of(first, row))
        first_seen = time.perf_counter()
        while self._going_on().any():
            assert following is not None
            memory, rows, upcoming = decode_block(*static, memory, rows, self._going_on(), *settings)
            emissions = jax.device_get(following)
            for each_pass in range(PASSES_IN_A_BLOCK):
                for row, answer in enumerate(self.answers):
                    answer.take_pass(part_of(emissions, each_pass, slice(None), row))
            following = upcoming
        return self._collect(first_seen - begin, time.perf_counter() - first_seen)

    def _going_on(self) -> np.ndarray:
        going_on = [answer.reason is None for answer in self.answers]
        return np.array(going_on + [False] * (len(self.prompts) - self.asked))

    def _empty(self) -> Memory:
        """Memory with room for everything."""
        text = self.model.config.text
        needed = max(len(prompt) + int(most) for prompt, most in zip(self.prompts, self.most, strict=True))
        return empty_memory(
            self.model,
            self.placement,
            batch=len(self.prompts),
            capacity=cache_capacity(needed, text.max_context),
            speculation=self.speculation,
        )

    def _padded_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens and segment ids of every piece of the prompts, padded on the right with padding ids."""
        for chunk in prefill_chunks(max(map(len, self.prompts))):
            tokens = np.zeros((len(self.prompts), chunk.padded_length), np.int32)
            segment_ids = np.zeros_like(tokens)
            for row, prompt in enumerate(self.prompts):
                piece = prompt[chunk.start : chunk.stop]
                tokens[row, : len(piece)] = piece
                segment_ids[row, : len(piece)] = 1
            yield tokens, segment_ids

    def _compile(self, program: Any, *arguments: Any, **static: Any) -> None:
        begin = time.perf_counter()
        program.lower(*arguments, **static).compile()
        self.compile_seconds += time.perf_counter() - begin

    def _collect(self, prefill_seconds: float, decode_seconds: float) -> GenerationResult:
        decode_tokens = sum(len(answer.tokens) - 1 for answer in self.answers)
        return GenerationResult(
            generations=tuple(answer.generation() for answer in self.answers),
            timing=Timing(
                compile_seconds=self.compile_seconds,
                prefill_tokens=sum(map(len, self.prompts)),
                prefill_seconds=prefill_seconds,
                decode_tokens=decode_tokens,
                decode_seconds=decode_seconds if decode_tokens else 0.0,
            ),
        )
