"""A tokenizer's vocabulary as `llguidance` reads it: the bytes that each token writes."""

from __future__ import annotations

from tokenizers import decoders

from qwen35_jax.inference.grammars.errors import GrammarError
from qwen35_jax.inference.tokenizer import Tokenizer


class Vocabulary:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer.

    Special tokens stand in no text (`AnswerText` hides them), so no grammar allows them. Added tokens that are not
    special, such as `<tool_call>`, are text like any other.

    Args:
        tokenizer: with a byte-level vocabulary, as the family's is.
        rows: of the embedding. Those that have no token write nothing, and no grammar allows them.
        stop_id: an id that stops answers.

    Raises:
        GrammarError: the vocabulary is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, stop_id: int):
        backend = tokenizer.backend
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise GrammarError(
                f"the tokenizer's decoder is {backend.decoder!r}, and grammars are for byte-level vocabularies only"
            )
        added = backend.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self.eos_token_id = stop_id
        self.bos_token_id = None
        self.special_token_ids = [token for token, entry in added.items() if entry.special and token < rows]
        self.tokens = [b""] * rows
        for text, token in backend.get_vocab(with_added_tokens=True).items():
            if token < rows:
                self.tokens[token] = _bytes_of(text)

    def __call__(self, text: str) -> list[int]:
        """How the model would write a text that a grammar leaves no choice about."""
        return self._tokenizer.encode(text, add_special_tokens=False, special_tokens=False)


def _bytes_of(token: str) -> bytes:
    """The bytes of a token; one with characters that stand for no byte, as an added one may have, is its own text."""
    if _BYTE_CHARACTERS.issuperset(token):
        return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    return token.encode()


def _byte_of_character() -> dict[int, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves, the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {byte: byte for byte in printable} | {0x100 + place: byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_CHARACTERS = frozenset(map(chr, _BYTE_OF_CHARACTER))
