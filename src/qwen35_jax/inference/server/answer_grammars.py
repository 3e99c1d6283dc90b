"""What `response_format` and `tool_choice` make of an answer: the grammar that it keeps to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt32

from qwen35_jax.inference.chat.messages import tool_schemas
from qwen35_jax.inference.constraint import Constraint
from qwen35_jax.inference.grammars.compiler import GrammarCompiler
from qwen35_jax.inference.grammars.errors import GrammarError, ToolError
from qwen35_jax.inference.grammars.walk import Walk
from qwen35_jax.inference.server.api_error import ApiError, field_error
from qwen35_jax.inference.server.fields import Fields
from qwen35_jax.inference.server.strict_schema import refuse_open_schema
from qwen35_jax.inference.server.tool_choice import ToolChoice

FORMATS = ("text", "json_object", "json_schema")


class AnswerGrammars:
    """Makes the constraints of chats.

    Args:
        compiler: for the model's vocabulary, and the ids that end an answer in a chat.
    """

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler

    def constraints(
        self, response_format: Fields | None, choice: ToolChoice, *, in_thought: bool
    ) -> Callable[[], Constraint | None]:
        """What makes a constraint for each answer to a request. The grammar is compiled here, once for all of them.

        Args:
            response_format: of the request.
            choice: of tools.
            in_thought: whether the answers begin inside the thoughts, which are free.

        Raises:
            ApiError: the format or a tool's schema cannot be kept to.
        """
        field, make = self._format(response_format)
        if make is not None and choice.tools:
            raise field_error(
                "response_format",
                "is given with tools: an answer is JSON or calls tools; leave one of them out, "
                "or say with tool_choice 'none' which it is",
            )
        if choice.mode == "required":
            field, make = "tools", lambda: self._compiler.tool_calls(choice.tools, parallel=choice.parallel)
            if len(choice.tools) == 1:
                (field,) = (f"{choice.places[name]}.parameters" for name in tool_schemas(choice.tools))
        if make is None:
            return lambda: None
        try:
            walk = make()
            begun = self._compiler.after_thought(walk) if in_thought else walk
        except ToolError as error:
            raise _refusal(f"{choice.places[error.tool]}.{error.part}", error) from error
        except GrammarError as error:
            raise _refusal(field, error) from error
        return lambda: _Told(begun.copy(), field)

    def _format(self, response_format: Fields | None) -> tuple[str, Callable[[], Walk] | None]:
        """What makes a constraint of a format, if one does, and the field that such a constraint comes from."""
        if response_format is None:
            return "", None
        kind = response_format.choice("type", FORMATS)
        if kind is None:
            raise field_error("response_format.type", f"is missing, expected one of {', '.join(FORMATS)}")
        if kind == "json_schema":
            described = response_format.inner("json_schema")
            if described is None:
                raise field_error("response_format.json_schema", "is missing")
            for told in ("name", "description"):
                described.text(told)
            strict = described.boolean("strict")
            schema = described.mapping("schema")
            if schema is None:
                raise field_error("response_format.json_schema.schema", "is missing, expected a JSON schema")
            described.refuse_unread()
            if strict:
                refuse_open_schema(schema, described.name("schema"))
            response_format.refuse_unread()
            return described.name("schema"), lambda: self._compiler.json_schema(schema)
        response_format.refuse_unread()
        return "response_format", self._compiler.json_object if kind == "json_object" else None


class _Told:
    """A constraint whose grammar may still break in the middle of an answer: its client is told by which field."""

    def __init__(self, constraint: Constraint, field: str):
        self._constraint = constraint
        self._field = field

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        try:
            return self._constraint.allowed()
        except GrammarError as error:
            raise _refusal(self._field, error) from error

    def accept(self, token: int) -> None:
        try:
            self._constraint.accept(token)
        except GrammarError as error:
            raise _refusal(self._field, error) from error


def _refusal(field: str, error: GrammarError) -> ApiError:
    return ApiError(f"{field}: {error}", param=field, code="invalid_value")
