"""Which token ids end an answer."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.tokenizer import Tokenizer, read_json_object

GENERATION_CONFIG = "generation_config.json"
END_OF_TURN = "<|im_end|>"
"""Ends every turn of the family's chat template."""


def stop_token_ids(
    folder: str | os.PathLike[str] | None,
    *,
    config_ids: Iterable[int] = (),
    tokenizer: Tokenizer | None = None,
) -> tuple[int, ...]:
    """The ids that end an answer, from the first source that names any.

    The order is that of `transformers`: `generation_config.json` of the folder, then `eos_token_id` of
    `config.json` (which in this family often names `<|endoftext|>` only), then the tokenizer's end token.

    Args:
        folder: the checkpoint's, or None where there is none.
        config_ids: `TextConfig.eos_token_id`.
        tokenizer: where there is one.

    Returns:
        All of them, ascending; empty when nothing names one.

    Raises:
        PromptError: `generation_config.json` is malformed; names the file and the field.
    """
    if folder is not None:
        path = Path(folder) / GENERATION_CONFIG
        ids = parse_token_ids(read_json_object(path).get("eos_token_id"), f"eos_token_id of {path}")
        if ids:
            return ids
    ids = tuple(sorted(set(config_ids)))
    if ids or tokenizer is None or tokenizer.eos_token_id is None:
        return ids
    return (tokenizer.eos_token_id,)


def chat_stop_token_ids(
    folder: str | os.PathLike[str] | None, *, config_ids: Iterable[int] = (), tokenizer: Tokenizer
) -> tuple[int, ...]:
    """The ids that end an answer in a chat: those of `stop_token_ids`, and the end of a turn.

    Some checkpoints name the end of texts only, after which a chat would go on with a turn of the user's.
    Arguments and errors as for `stop_token_ids`.
    """
    ids = set(stop_token_ids(folder, config_ids=config_ids, tokenizer=tokenizer))
    ends = (tokenizer.eos_token_id, tokenizer.token_id(END_OF_TURN))
    return tuple(sorted(ids.union(token for token in ends if token is not None)))


def parse_token_ids(value: Any, name: str) -> tuple[int, ...]:
    """A field that may be absent, one id or a list of ids, as an ascending tuple.

    Raises:
        PromptError: it is something else.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(_is_token_id(token) for token in ids):
        raise PromptError(f"{name} is {value!r}, expected a token id or a list of token ids")
    return tuple(sorted({int(token) for token in ids}))


def _is_token_id(value: Any) -> bool:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return 0 <= int(value) < 2**31  # a device's integers have 32 bits
