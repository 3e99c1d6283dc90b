"""From schemas and tools to constraints on an answer's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qwen35_jax.inference.grammars.errors import GrammarError, reason
from qwen35_jax.inference.grammars.number_length import JSONWalk
from qwen35_jax.inference.grammars.schema_parts import refuse_wide_objects
from qwen35_jax.inference.grammars.tool_calls import tool_call_grammar
from qwen35_jax.inference.grammars.vocabulary import Vocabulary
from qwen35_jax.inference.grammars.walk import AfterThought, GrammarWalk, Walk, as_bits
from qwen35_jax.inference.tokenizer import Tokenizer

# A space, or a line break and an indentation, between the parts of a JSON text: room for texts printed either way,
# and an end to what a model can write without getting any further.
WHITE_SPACE = r" |\n(?: {0,40}|\t{0,10})"

# Thoughts end at the first closing tag. Every template of the family then leaves one line empty.
_THOUGHT = r"""
start: thought "\n\n"
thought[lazy]: /(?s:.*)<\/think>/
"""


class GrammarCompiler:
    """Makes constraints for the answers of one model. Threads may share it; each constraint is of one answer.

    Making it takes about a second for the family's 248,000 tokens, and a constraint about a millisecond.

    Args:
        tokenizer: with a byte-level vocabulary, as the family's is.
        rows: of the model's embedding, which are usually more than the tokenizer has tokens.
        stop_ids: ids that stop an answer. All are allowed where a grammar may end.

    Raises:
        GrammarError: `llguidance` is not installed, the vocabulary is not byte-level, or no id stops an answer.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, stop_ids: Iterable[int]):
        try:
            import llguidance
        except ImportError as error:
            raise GrammarError(
                "answers that keep to a schema need llguidance, which is not installed: "
                "pip install 'qwen35-jax[serve]'"
            ) from error
        stop_ids = tuple(token for token in stop_ids if token < rows)
        if not stop_ids:
            raise GrammarError("no token stops an answer, so none could end where its schema does")
        self._llguidance = llguidance
        self._stop_id = stop_ids[0]
        self._stop_ids = as_bits(stop_ids, rows)
        vocabulary = Vocabulary(tokenizer, rows, self._stop_id)
        self._tokens = vocabulary.tokens
        starts_with_digit = (token for token, text in enumerate(vocabulary.tokens) if text[:1].isdigit())
        self._digit_tokens = as_bits(tuple(starts_with_digit), rows)
        self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=rows)
        # At the default limits an object with 500 properties that may all be absent is refused, and refused in the
        # middle of an answer. These leave room for the objects that `refuse_wide_objects` lets through.
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=30_000, step_max_items=1_000_000, verbose_errors=False
        )

    def json_schema(self, schema: Mapping[str, Any]) -> Walk:
        """An answer that is JSON of a schema and nothing else.

        Of JSON Schema it takes what `llguidance` does, which is most of draft 2020-12. Properties come in the schema's
        order; others may follow them, unless `additionalProperties` is false. Numbers end after 20 digits before the
        point and behind it, where the schema lets them.

        Raises:
            GrammarError: the schema is malformed, too large, satisfied by nothing, or has a keyword that no grammar
                can hold an answer to.
        """
        try:
            refuse_wide_objects(schema, schema)
            grammar = self._llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema, allow_nan=False), overrides={"whitespace_pattern": WHITE_SPACE}
            )
        except RecursionError:
            raise GrammarError("the schema is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise GrammarError(f"the schema is no JSON object: {error}") from error
        walk = self._walk(grammar, "the schema cannot be kept to")
        return JSONWalk(walk, self._tokens, self._digit_tokens)

    def json_object(self) -> Walk:
        """An answer that is a JSON object, whatever is in it."""
        return self.json_schema({"type": "object"})

    def tool_calls(
        self, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
    ) -> Walk:
        """An answer that calls tools and says nothing else, in the family's text format (see `chat.tool_call`).

        Args:
            tools: that may be called, in the form of the OpenAI API.
            name: of the one that has to be called; None leaves the choice.
            parallel: whether more than one call may be made.

        Raises:
            MessageError: a tool is malformed.
            GrammarError: no tool is declared, none has that name, or the schemas are too much for one grammar.
            ToolError: calls of one tool cannot be held to its schema.
        """
        try:
            rules = tool_call_grammar(tools, name=name, parallel=parallel)
        except RecursionError:
            raise GrammarError("a tool's schema is nested too deeply") from None
        grammar = self._llguidance.LLMatcher.grammar_from_lark(rules)
        return self._walk(grammar, "the tools' schemas cannot be kept to")

    def after_thought(self, answer: Walk) -> AfterThought:
        """The constraint for an answer that begins inside of thoughts: free up to `</think>` and an empty line."""
        grammar = self._llguidance.LLMatcher.grammar_from_lark(_THOUGHT)
        return AfterThought(self._walk(grammar, "thoughts cannot be followed"), answer)

    def _walk(self, grammar: str, complaint: str) -> GrammarWalk:
        matcher = self._llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(f"{complaint}: {reason(matcher.get_error())}")
        walk = GrammarWalk(matcher, self._stop_id, self._stop_ids)
        walk.allowed()  # some grammars show at their first step only that they cannot be walked: `{"$ref": "#"}`
        return walk
