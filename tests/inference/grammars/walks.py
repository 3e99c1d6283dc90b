"""Random walks through constraints on nano's vocabulary, in a model with more rows than it has tokens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from qwen35_jax.inference.constraint import Constraint
from qwen35_jax.inference.grammars.compiler import GrammarCompiler
from qwen35_jax.inference.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[3] / "src/qwen35_jax/nano")
ROWS = 2_339  # the tokenizer has 2,304 tokens
STOP_IDS = (2_273, 2_271)  # <|im_end|> and <|endoftext|>
COMPILER = GrammarCompiler(TOKENIZER, ROWS, STOP_IDS)

SPECIAL = {token for token, entry in TOKENIZER.backend.get_added_tokens_decoder().items() if entry.special}
NEVER = (SPECIAL | set(range(TOKENIZER.vocabulary_size, ROWS))).difference(STOP_IDS)
# What leads a walk to an end: a model would, a random draw from thousands of tokens hardly ever does.
ENDINGS = ['"', "}", "]", "1", "\n</parameter>\n", "</function>\n</tool_call>", "</think>\n\n"]


def allowed_tokens(constraint: Constraint) -> set[int]:
    """The tokens that a constraint allows, after a look at those that none may ever allow."""
    words = constraint.allowed()
    assert words.dtype == np.uint32
    assert words.shape == (-(-ROWS // 32),)
    allowed = {int(token) for token in np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]}
    assert allowed
    assert not allowed & NEVER
    assert max(allowed) < ROWS
    assert not allowed & set(STOP_IDS) or allowed.issuperset(STOP_IDS)
    return allowed


def random_text(constraint: Constraint, source: random.Random) -> str:
    """The text of a walk over allowed tokens, up to a stop id."""
    tokens: list[int] = []
    ending: list[int] = []
    while True:
        allowed = allowed_tokens(constraint)
        if not ending and source.random() < 0.2 + len(tokens) / 300:
            ending = TOKENIZER.encode(source.choice(ENDINGS))
        if STOP_IDS[0] in allowed and source.random() < 0.5:
            token = source.choice(STOP_IDS)
        elif ending and ending[0] in allowed:
            token = ending[0]
        else:
            ending = []
            token = source.choice(sorted(allowed))
        constraint.accept(token)
        if token in STOP_IDS:
            assert allowed_tokens(constraint) == set(STOP_IDS)
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
        ending = ending[1:]
        tokens.append(token)
        assert len(tokens) < 5_000


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a constraint allows a text, token by token, and an end behind it."""
    for token in TOKENIZER.encode(text):
        if token not in allowed_tokens(constraint):
            return False
        constraint.accept(token)
    return STOP_IDS[0] in allowed_tokens(constraint)
