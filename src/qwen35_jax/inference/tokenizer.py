"""Text to token ids and back, from a checkpoint's `tokenizer.json`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qwen35_jax.errors import PromptError

FILE_NAME = "tokenizer.json"
CONFIG_FILE_NAME = "tokenizer_config.json"


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Names of special tokens that stand in a text, such as `<|im_end|>`, become those tokens, as they do in
    `transformers`: chat templates rely on it. Text from people who are not trusted should therefore be
    encoded with `special_tokens=False`, which reads such names as ordinary characters. Threads may share a tokenizer.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        config: what `tokenizer_config.json` says, or an empty dictionary.
        vocabulary_size: one more than the highest id the tokenizer knows. The embedding usually has more rows
            (padding to a round number); those are never drawn.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None):
        self.backend = backend
        self.config = config or {}
        self.vocabulary_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Reads `tokenizer.json` and, where there is one, `tokenizer_config.json`.

        Raises:
            PromptError: `tokenizer.json` is absent or cannot be read.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise PromptError(
                f"{folder} has no {FILE_NAME}, so text cannot be turned into tokens: "
                "add the file, or give token ids (--prompt-ids 5,17,3)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every kind of bad file
            raise PromptError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error
        # Set by some files for training; a prompt must be neither cut nor padded behind our back.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, read_json_object(Path(folder) / CONFIG_FILE_NAME))

    def encode(self, text: str, *, add_special_tokens: bool = True, special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: let the file's post-processor put tokens around the text (this family's has
                none); off for rendered chats, which bring their own.
            special_tokens: whether names of special tokens in the text stand for these tokens.

        Raises:
            PromptError: the text holds a lone surrogate, as Python makes of bytes that are no valid UTF-8.
        """
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError("the text is not valid UTF-8: look at how it was read")
        backend = self.backend if special_tokens else self._literal_backend
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A copy of `backend` that reads names of special tokens as ordinary characters.

        The library has no argument for it, and a flag that changes between calls would be seen by other threads. The
        copy takes as long to make as the file takes to read, once.
        """
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of one token by its name, or None."""
        return self.backend.token_to_id(token)

    @property
    def eos_token_id(self) -> int | None:
        """The end token that `tokenizer_config.json` names, `<|im_end|>` in the family's instruct models."""
        token = self.special_token("eos_token")
        return None if token is None else self.token_id(token)

    def special_token(self, role: str) -> str | None:
        """The text of the token that `tokenizer_config.json` gives a role such as `eos_token`, or None."""
        token = self.config.get(role)
        if isinstance(token, dict):  # written so by older libraries: {"content": "<|im_end|>", ...}
            token = token.get("content")
        return token if isinstance(token, str) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; an empty one where the file is absent.

    Raises:
        PromptError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise PromptError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def check_token_ids(tokens: Iterable[int], vocabulary_size: int) -> list[int]:
    """The tokens as a list of plain integers.

    Raises:
        PromptError: one of them is no integer, or has no row in the embedding.
    """
    checked = []
    for position, token in enumerate(tokens):
        try:
            value = int(token)
        except (TypeError, ValueError):
            value = None
        if value is None or value != token or isinstance(token, bool):
            raise PromptError(f"prompt token {position} is {token!r}, expected an integer")
        if not 0 <= value < vocabulary_size:
            raise PromptError(
                f"prompt token {position} is {value}, expected an id from 0 to {vocabulary_size - 1}"
            )
        checked.append(value)
    return checked
