"""Trains the tokenizer: byte-level BPE with the family's normaliser, split pattern and special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCABULARY_SIZE = 2304
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the family's order; True where the token is hidden by `skip_special_tokens`.
SPECIAL_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|fim_prefix|>": False,
    "<|fim_middle|>": False,
    "<|fim_suffix|>": False,
    "<|fim_pad|>": False,
    "<|repo_name|>": False,
    "<|file_sep|>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
    "<|audio_start|>": True,
    "<|audio_end|>": True,
    "<tts_pad>": True,
    "<tts_text_bos>": True,
    "<tts_text_eod>": True,
    "<tts_text_bos_single>": True,
    "<|audio_pad|>": True,
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learns merges from texts; the special tokens take the last ids of the vocabulary.

    Returns:
        A tokenizer of exactly VOCABULARY_SIZE tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    plain_texts = (_without_special_tokens(text) for text in texts)
    tokenizer.train_from_iterator(
        plain_texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in SPECIAL_TOKENS.items()]
    )
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, expected {VOCABULARY_SIZE}")
    return tokenizer


def _without_special_tokens(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, " ")
    return text


def tokenizer_config(tokenizer: Tokenizer, chat_template: str | None = None) -> dict:
    """The contents of tokenizer_config.json."""
    decoder = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for text, special in SPECIAL_TOKENS.items()
    }
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    return config if chat_template is None else config | {"chat_template": chat_template}
