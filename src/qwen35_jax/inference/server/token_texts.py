"""What single tokens stand for, as the API tells it beside log-probabilities."""

from __future__ import annotations

from qwen35_jax.inference.grammars.vocabulary import Vocabulary
from qwen35_jax.inference.tokenizer import Tokenizer


class TokenTexts:
    """The bytes and the text of each token of a vocabulary.

    Args:
        tokenizer: with a byte-level vocabulary, as the family's is.
        rows: of the model's embedding. Those that have no token stand for nothing.

    Raises:
        GrammarError: the vocabulary is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int):
        self._bytes = Vocabulary(tokenizer, rows, stop_id=0).tokens
        self._longest = max(map(len, self._bytes))

    def fewest_for(self, text: str) -> int:
        """Tokens that a text takes at least: what the tokenizer would make of it is not fewer."""
        return -(-len(text.encode("utf-8", errors="replace")) // self._longest)

    def bytes_of(self, token: int) -> bytes:
        """UTF-8, of which a token may hold a part of a character."""
        return self._bytes[token]

    def text_of(self, token: int) -> str:
        """The bytes as text; what is no whole character becomes U+FFFD."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def key_of(self, token: int) -> str:
        r"""The text where it is whole characters, and else its bytes as in `bytes:\xe2\x82`, as the API has them."""
        content = self.bytes_of(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
