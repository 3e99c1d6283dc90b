"""The one model of a server, with all that its requests are read by."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Self

from qwen35_jax.config import TextConfig
from qwen35_jax.inference.chat_template import FILE_NAME, ChatTemplate
from qwen35_jax.inference.grammars.compiler import GrammarCompiler
from qwen35_jax.inference.server.answer_grammars import AnswerGrammars
from qwen35_jax.inference.server.chat_prompt import ChatPrompts
from qwen35_jax.inference.server.token_texts import TokenTexts
from qwen35_jax.inference.settings import GenerationSettings, recommended_settings
from qwen35_jax.inference.stop_tokens import chat_stop_token_ids, stop_token_ids
from qwen35_jax.inference.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What a server knows of its model without the weights.

    Attributes:
        name: by which clients ask for it.
        config: of the text model.
        tokenizer: of the model.
        token_texts: of its vocabulary.
        chat_prompts: makes prompts of conversations; None where the checkpoint has no chat template.
        defaults: settings of answers for which a client asks nothing else.
        stop_ids: that end a text.
        chat_stop_ids: that end an answer in a chat.
        grammars: for answers in a chat that have to be JSON or calls.
    """

    name: str
    config: TextConfig
    tokenizer: Tokenizer
    token_texts: TokenTexts
    chat_prompts: ChatPrompts | None
    defaults: GenerationSettings
    stop_ids: tuple[int, ...]
    chat_stop_ids: tuple[int, ...]
    grammars: AnswerGrammars

    @classmethod
    def from_folder(cls, name: str, folder: str | os.PathLike[str], config: TextConfig) -> Self:
        """Reads what stands beside the weights, and prepares it: seconds, for the family's vocabulary.

        Args:
            name: by which clients ask for the model.
            folder: the checkpoint's.
            config: of the text model.

        Raises:
            PromptError: there is no tokenizer, or a file is malformed.
            CheckpointError: a setting of `generation_config.json` is.
            GrammarError: the vocabulary is not byte-level, or nothing ends an answer.
        """
        tokenizer = Tokenizer.from_folder(folder)
        ids = config.eos_token_id
        chat_stop_ids = chat_stop_token_ids(folder, config_ids=ids, tokenizer=tokenizer)
        return cls(
            name=name,
            config=config,
            tokenizer=tokenizer,
            token_texts=TokenTexts(tokenizer, config.vocab_size),
            chat_prompts=_chat_prompts(folder, tokenizer),
            defaults=recommended_settings(folder),
            stop_ids=stop_token_ids(folder, config_ids=ids, tokenizer=tokenizer),
            chat_stop_ids=chat_stop_ids,
            grammars=AnswerGrammars(GrammarCompiler(tokenizer, config.vocab_size, chat_stop_ids)),
        )


def _chat_prompts(folder: str | os.PathLike[str], tokenizer: Tokenizer) -> ChatPrompts | None:
    if not (Path(folder) / FILE_NAME).is_file() and tokenizer.config.get("chat_template") is None:
        return None
    return ChatPrompts(ChatTemplate.from_folder(folder), tokenizer)
