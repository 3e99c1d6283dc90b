"""The grammar of answers that call tools, in the text format of the family (see `chat.tool_call`).

A call has the parameters that its tool declares, in any order, each once at most, and the required ones. What the
format can say of a value depends on its type:

* A string stands as it is and ends at `</parameter>`, so it cannot hold that tag. `enum`, `const`, `minLength`,
  `maxLength` and `pattern` are kept to, `format` is not. A value without a declared type is read as a string, and one
  that may be any string, or something else, is not held to what else it may be.
* Any other value is JSON on one line, with or without spaces behind commas and colons; booleans and null may also be
  what Python prints for them. Keywords that no grammar can hold an answer to are left out, unless the tool is declared
  `strict`. `oneOf` is read as `anyOf`. A number without bounds ends after 20 digits.

The result is text in the dialect of Lark that `llguidance` reads. Rules are numbered by function, parameter and
alternative.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwen35_jax.inference.chat.messages import tool_schemas
from qwen35_jax.inference.chat.tool_call import ToolCall, ToolCallReader
from qwen35_jax.inference.grammars.errors import GrammarError, ToolError, reason
from qwen35_jax.inference.grammars.number_length import NUMBERS
from qwen35_jax.inference.grammars.schema_parts import referred, refuse_wide_objects

MOST_TOOLS = 128
"""That one grammar may choose from; it is what the OpenAI API takes, and takes half a second to compile."""
MOST_PARAMETERS = 64
"""Of one tool: which ones a call has given is remembered in the bits of one word."""

# A text that does not end its call, as the second pair of tags would; `text` is one up to its closing tag.
_TEXT = r"""
TEXT: /(?s:.*)/ & ~/(?s:.*)<\/function>[ \t\r\n]*<\/tool_call>(?s:.*)/
TEXT_AND_TAG: TEXT "</parameter>"
text[lazy]: TEXT_AND_TAG
ONE_VALUE: TEXT & ~/(?s:.*)<\/parameter>(?s:.*)/
"""
_CLOSING_TAG = '"\\n</parameter>"'
# Without white space to skip, these grammars and the one around them are walked as one.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SPELLINGS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
_ENDING_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples"})
"""Keywords that leave a number as it is."""
_STRING_KEYWORDS = ("minLength", "maxLength", "pattern")


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
) -> str:
    """The grammar; arguments and errors as for `GrammarCompiler.tool_calls`, `ToolError` among them."""
    schemas = tool_schemas(tools)
    strict = {function["name"] for tool in tools if (function := tool.get("function", tool)).get("strict")}
    if name is not None and name not in schemas:
        raise GrammarError(
            f"no tool is called {name!r}, the declared ones are {', '.join(schemas) or 'none'}"
        )
    if not schemas:
        raise GrammarError("no tool is declared, so none can be called")
    called = [name] if name is not None else list(schemas)
    if len(called) > MOST_TOOLS:
        raise GrammarError(f"{len(called)} tools are declared, and calls can be held to {MOST_TOOLS} at most")
    functions = " | ".join(f"function_{index}" for index in range(len(called)))
    rules = [
        'start: call ("\\n" call)*' if parallel else "start: call",
        f'call: "<tool_call>\\n<function=" ({functions}) "</function>\\n</tool_call>"',
    ]
    for index, function in enumerate(called):
        part = "name"
        try:
            _check_writable(f"the name of tool {function!r}", ToolCall(function, {}))
            part = "parameters"
            rules += _function_rules(index, function, schemas[function], strict=function in strict)
        except GrammarError as error:
            raise ToolError(str(error), function, part) from error
    return "\n".join(rules) + _TEXT


def may_be_text(parameter: str, schema: Mapping[str, Any]) -> bool:
    """Whether a value in a call may be a text, which stands as it is, and not as JSON.

    Args:
        parameter: name of the value.
        schema: of all parameters.

    Raises:
        GrammarError: calls cannot be held to the schema.
    """
    declared = schema.get("properties")
    value = declared.get(parameter) if isinstance(declared, Mapping) else None
    kinds = _kinds(value, schema, f"parameter {parameter!r}")
    return any(
        isinstance(kind["const"], str) if "const" in kind else kind["type"] == "string" for kind in kinds
    )


def _function_rules(index: int, function: str, schema: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
    """The rules of one function: its name, its parameters in any order, and the values of each."""
    for keyword in ("$ref", "allOf", "anyOf", "oneOf", "not"):
        if keyword in schema:
            raise GrammarError(
                f"the parameters of tool {function!r} have {keyword}, and calls cannot be held to "
                "that: write the properties out"
            )
    if schema.get("type", "object") != "object":
        raise GrammarError(f"the parameters of tool {function!r} are {schema['type']!r}, expected an object")
    declared = schema.get("properties")
    declared = declared if isinstance(declared, Mapping) else {}
    required = [name for name in _as_list(schema.get("required")) if isinstance(name, str)]
    parameters = {name: declared.get(name) for name in [*required, *declared]}  # the required ones first
    if len(parameters) > MOST_PARAMETERS:
        raise GrammarError(
            f"tool {function!r} has {len(parameters)} parameters, and calls can be held to {MOST_PARAMETERS} at most"
        )
    if not parameters:
        yield f"function_{index}: {_literal(function + '>' + chr(10))}"
        return
    yield f"function_{index}: {_literal(function + '>' + chr(10))} parameters_{index}::0x0"
    # The bits of a rule's argument tell which parameters have been given.
    alternatives = [f'"" %if is_ones([0:{len(set(required))}])' if required else '""']
    for bit, (name, value) in enumerate(parameters.items()):
        where = f"parameter {name!r} of tool {function!r}"
        _check_writable(f"the name of {where}", ToolCall(function, {name: ""}))
        rule = f"value_{index}_{bit}"
        opening = _literal(f"<parameter={name}>\n")
        alternatives.append(f'{opening} {rule} "\\n" parameters_{index}::set_bit({bit}) %if bit_clear({bit})')
        yield from _value_rules(rule, where, value, schema, strict=strict)
    yield f"parameters_{index}::_ : " + "\n | ".join(alternatives)


def _value_rules(
    rule: str, where: str, schema: Any, root: Mapping[str, Any], *, strict: bool
) -> Iterator[str]:
    """The rules of a value and its closing tag, the whole under the name `rule`."""
    alternatives = []
    texts: list[str] = []
    for index, kind in enumerate(_kinds(schema, root, where)):
        part = f"{rule}_{index}"
        if "const" in kind:
            texts += _spelled(kind["const"])
        elif kind["type"] == "string":
            if not any(keyword in kind for keyword in _STRING_KEYWORDS):
                yield f"{rule}: text"
                return
            alternatives.append(part)
            yield f"{part.upper()}: ({_string_terminal(kind, where)}) {_CLOSING_TAG}"
            yield f"{part}[lazy]: {part.upper()}"
        elif isinstance(name := kind["type"], str) and name in _SPELLINGS:
            texts += _SPELLINGS[name]
        elif isinstance(name, str) and name in NUMBERS and _ANNOTATIONS.issuperset(kind):
            alternatives.append(f"{part.upper()} {_CLOSING_TAG}")
            yield f"{part.upper()}: /{NUMBERS[name]}/"
        else:
            alternatives.append(f"{part} {_CLOSING_TAG}")
            yield f"{part}: %json {_json_schema(kind, root, where, strict=strict)}"
    if texts:
        for text in texts:
            if "<" in text:
                _check_writable(f"a value listed for {where}", ToolCall("f", {"p": text}))
        alternatives.append(rule.upper())
        yield f"{rule.upper()}: ({' | '.join(map(_literal, texts))}) {_CLOSING_TAG}"
    if not alternatives:
        raise GrammarError(f"{where} has no value that it may be")
    yield f"{rule}: " + "\n | ".join(alternatives)


def _kinds(
    schema: Any, root: Mapping[str, Any], where: str, followed: frozenset[str] = frozenset()
) -> Iterator[Mapping[str, Any]]:
    """The kinds of value that a schema allows: schemas with `const`, or with `type`.

    The latter is one type, or several, none of them string.
    """
    if not isinstance(schema, Mapping):
        yield {"type": "string"}
        return
    alternatives = [*_as_list(schema.get("anyOf")), *_as_list(schema.get("oneOf"))]
    parts = _as_list(schema.get("allOf"))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in followed:
            raise GrammarError(f"the schema of {where} refers to itself by {reference!r}")
        target = referred(reference, root)
        if not isinstance(target, Mapping):
            raise GrammarError(f"the schema of {where} refers to {reference!r}, which is no part of it")
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        yield from _kinds({**target, **beside}, root, where, followed | {reference})
    elif "const" in schema or "enum" in schema:
        constants = [schema["const"]] if "const" in schema else _as_list(schema["enum"])
        yield from ({"const": value} for value in constants)
    elif schema.get("type") is not None:
        yield from ({**schema, "type": name} for name in _as_list(schema["type"]))
    elif alternatives:
        for alternative in alternatives:
            yield from _kinds(alternative, root, where, followed)
    elif len(parts) == 1:
        yield from _kinds(parts[0], root, where, followed)
    else:
        kinds = [kind for part in parts for kind in _kinds(part, root, where, followed)]
        types = {name for kind in kinds for name in _as_list(kind.get("type", "string"))}
        if not types or "string" in types:
            yield {"type": "string"}
        else:
            yield {**schema, "type": sorted(types)}


def _json_schema(kind: Mapping[str, Any], root: Mapping[str, Any], where: str, *, strict: bool) -> str:
    """A schema as a text of its own: what it refers to goes with it."""
    import llguidance

    try:
        refuse_wide_objects(kind, root)
    except GrammarError as error:
        raise GrammarError(f"{where} cannot be held to its schema: {error}") from error
    schema: dict[str, Any] = {**_moved(kind), "x-guidance": {**_ONE_LINE, "lenient": not strict}}
    if '"$ref"' in json.dumps(schema):
        schema["$defs"] = {"tool": {key: _moved(value) for key, value in root.items() if key != "$id"}}
    text = json.dumps(schema)
    _check_grammar(where, llguidance.LLMatcher.grammar_from_json_schema(text))
    return text


def _moved(schema: Any) -> Any:
    """A schema with its references turned to where `_json_schema` puts their root."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: value if key in ("const", "enum") else _moved(value) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/tool{reference[1:]}"
    return moved


def _string_terminal(schema: Mapping[str, Any], where: str) -> str:
    """The terminal of a string that is held to a length or a pattern."""
    import llguidance

    keywords = {key: schema[key] for key in _STRING_KEYWORDS if key in schema}
    _check_grammar(
        where, llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", **keywords}))
    )
    terminal = "ONE_VALUE"
    if "minLength" in keywords or "maxLength" in keywords:
        terminal += f" & /(?s:.{{{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}}})/"
    if "pattern" in keywords:
        # A pattern may match anywhere. Anchors, which these expressions do not have, are taken off its ends.
        pattern = keywords["pattern"]
        begins = pattern.startswith("^")
        ends = _ENDING_ANCHOR.search(pattern) is not None
        body = llguidance.regex_to_lark(pattern[begins : len(pattern) - ends], "dw")
        _check_grammar(where, llguidance.LLMatcher.grammar_from_regex(body))
        terminal += f" & /{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}/"
    return terminal


def _spelled(value: Any) -> Sequence[str]:
    """The texts that are read as a value."""
    if isinstance(value, str):
        return (value,)
    if value is None:
        return _SPELLINGS["null"]
    if isinstance(value, bool):
        return (str(value).lower(), str(value))
    return (json.dumps(value, ensure_ascii=False),)


def _check_writable(what: str, call: ToolCall) -> None:
    """Whether a call can be told from its text."""
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in call.arguments.items())
    reader = ToolCallReader({})
    reader.push(f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>")
    if reader.call != call:
        raise GrammarError(
            f"{what} cannot be told from the tags around it: choose one without such characters"
        )


def _check_grammar(where: str, grammar: str) -> None:
    import llguidance

    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise GrammarError(f"{where} cannot be held to its schema: {reason(messages[0])}")


def _literal(text: str) -> str:
    """A text as a terminal."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [] if value is None else [value]
