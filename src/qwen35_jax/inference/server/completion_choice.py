"""One choice of a completion's reply: a text, whole or in pieces."""

from __future__ import annotations

from qwen35_jax.inference.results import FinishReason, TokenEvent, TokenLogprob
from qwen35_jax.inference.server.choice import JSON
from qwen35_jax.inference.server.completion_request import CompletionRequest
from qwen35_jax.inference.server.token_texts import TokenTexts
from qwen35_jax.inference.streaming import Detokenizer
from qwen35_jax.inference.tokenizer import Tokenizer


class CompletionChoice:
    """The text of one answer; see `Choice`.

    Args:
        index: of the choice.
        request: that it answers.
        token_texts: of the vocabulary, for log-probabilities.
        tokenizer: of the model, to tell where in the text a token stands.
    """

    def __init__(self, index: int, request: CompletionRequest, token_texts: TokenTexts, tokenizer: Tokenizer):
        self.satisfied = False
        self.reasoning_tokens = 0
        self._index = index
        self._stop_ids = frozenset(request.requests[index].stop_ids)
        self._echo = request.echoes[index]
        self._text = self._echo
        self._token_texts = token_texts
        self._tells_logprobs = request.top_logprobs is not None
        self._logprobs: list[TokenLogprob] = []
        self._offsets: list[int] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._length = 0  # of the text of all tokens so far, in characters
        self._told_text = len(self._echo)
        self._told_logprobs = 0
        self._reason: str | None = None

    def opening(self) -> list[JSON]:
        return [self._piece(self._echo, 0, 0)] if self._echo else []

    def take(self, event: TokenEvent) -> None:
        self._text += event.text
        if event.logprob is not None and event.token not in self._stop_ids:
            self._logprobs.append(event.logprob)
            self._offsets.append(self._length)
            self._length += len(self._detokenizer.push(event.logprob.token))

    def end(self, reason: FinishReason) -> None:
        self._reason = reason

    def released(self) -> list[JSON]:
        text, before = self._text[self._told_text :], self._told_logprobs
        if not text and self._reason is None:
            return []
        self._told_text, self._told_logprobs = len(self._text), len(self._logprobs)
        return [self._piece(text, before, self._told_logprobs) | {"finish_reason": self._reason}]

    def whole(self) -> JSON:
        return self._piece(self._text, 0, len(self._logprobs)) | {"finish_reason": self._reason}

    def _piece(self, text: str, start: int, stop: int) -> JSON:
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs_of(start, stop) if self._tells_logprobs else None,
            "finish_reason": None,
        }

    def _logprobs_of(self, start: int, stop: int) -> JSON:
        told = self._logprobs[start:stop]
        name = self._token_texts.key_of
        return {
            "tokens": [name(each.token) for each in told],
            "token_logprobs": [each.logprob for each in told],
            "top_logprobs": [{name(token): logprob for token, logprob in each.top} for each in told],
            "text_offset": self._offsets[start:stop],
        }
