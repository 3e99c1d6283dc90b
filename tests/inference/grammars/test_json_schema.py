"""Answers that are JSON of a schema: every walk ends in one, and nothing else can be written."""

from __future__ import annotations

import copy
import json
import random
import sys
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from qwen35_jax.errors import Qwen35Error
from qwen35_jax.inference.constraint import Constraint
from qwen35_jax.inference.grammars.compiler import GrammarCompiler
from qwen35_jax.inference.grammars.errors import GrammarError
from qwen35_jax.inference.grammars.number_length import MOST_DIGITS
from qwen35_jax.inference.grammars.schema_parts import MOST_OPTIONAL
from qwen35_jax.inference.tokenizer import Tokenizer
from tests.inference.conftest import FamilyTokenizer
from tests.inference.grammars.walks import COMPILER, STOP_IDS, TOKENIZER, accepts, allowed_tokens, random_text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "traurig 😀", None, 3]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": ["integer", "null"]}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "boolean"},
                "branches": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
SCALARS = st.one_of(
    st.just({"type": "string"}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda least, span: {"type": "integer", "minimum": least, "maximum": least + span},
        st.integers(-99, 99),
        st.integers(0, 999),
    ),
    st.builds(
        lambda least, span: {"type": "string", "minLength": least, "maxLength": least + span},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9), st.none()), min_size=1, max_size=3),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{2}-\\d+$"}, {"type": "string", "format": "date"}]),
)


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, least, span: {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + span,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    properties = st.dictionaries(st.text('ab"\\é\n', min_size=1, max_size=3), inner, max_size=3)
    objects = st.builds(
        lambda properties, seed, more: {
            "type": "object",
            "properties": properties,
            "required": [name for place, name in enumerate(properties) if seed >> place & 1],
            "additionalProperties": more,
        },
        properties,
        st.integers(0, 7),
        st.sampled_from([False, {"type": "boolean"}]),
    )
    return arrays | objects | st.builds(lambda first, second: {"anyOf": [first, second]}, inner, inner)


SCHEMAS = st.recursive(SCALARS, compound, max_leaves=5)


@settings(max_examples=60)
@given(st.one_of(st.sampled_from([PERSON, TREE]), SCHEMAS), st.integers(0, 2**32))
def test_every_walk_ends_in_json_of_the_schema(schema: dict[str, Any], seed: int) -> None:
    text = random_text(COMPILER.json_schema(schema), random.Random(seed))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_every_walk_through_an_object_of_any_kind_ends_in_one(seed: int) -> None:
    assert isinstance(json.loads(random_text(COMPILER.json_object(), random.Random(seed))), dict)


FREE = {
    "nothing in it": "{}",
    "indented": json.dumps(
        {"a": [1, -2.5e-3, {}, [], None, True], "b": {"é 🙂": '"\\'}}, indent=4, ensure_ascii=False
    ),
    "compact": '{"a":[0,{"b":false}]}',
    "long numbers": '{"a": [12345678901234567890, -0.12345678901234567890, 1E+99]}',
}
NOT_FREE = {
    "a list": "[]",
    "digits without end": '{"a": ' + 21 * "1",
    "digits without end behind the point": '{"a": 0.' + 21 * "1",
    "zeros without end": '{"a": 00',
    "more than a float can be": '{"a": 1e100',
    "blanks without end": '{"a":  ',
    "line breaks without end": "{\n\n",
    "half a character in an escape": r'{"a": "\ud800"}',
    "a comma behind the last member": '{"a": 1,}',
}


@pytest.mark.parametrize("text", FREE.values(), ids=FREE)
def test_an_object_of_any_kind_is_accepted_however_it_is_printed(text: str) -> None:
    json.loads(text)
    assert accepts(COMPILER.json_object(), text)


@pytest.mark.parametrize("text", NOT_FREE.values(), ids=NOT_FREE)
def test_an_object_of_any_kind_does_not_run_on(text: str) -> None:
    assert not begins(COMPILER.json_object(), text)


def begins(constraint: Constraint, text: str) -> bool:
    """Whether a constraint allows a text and more behind it."""
    for token in TOKENIZER.encode(text):
        if token not in allowed_tokens(constraint):
            return False
        constraint.accept(token)
    return True


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_of_a_schema_end_where_it_lets_them(kind: str) -> None:
    digits = MOST_DIGITS * "1"
    for text in (digits, f"-{digits}", *((f"{digits}.{digits}E-10", "0e99") if kind == "number" else ())):
        constraint = COMPILER.json_schema({"type": kind})
        assert begins(constraint, text)
        assert not begins(constraint, "1")
    assert accepts(COMPILER.json_schema({"type": "number", "const": 10**22}), "1" + 22 * "0")
    assert accepts(COMPILER.json_schema({"type": "string"}), f'"\\"{digits}{digits}"')


def test_a_copy_counts_the_digits_before_it() -> None:
    constraint = COMPILER.json_schema({"type": "array"})
    assert begins(constraint, f"[{MOST_DIGITS * '1'}")
    copied = constraint.copy()
    assert begins(constraint, ", 1")
    assert not begins(copied, "1")
    assert begins(copied, ", 1")


COMPACT = '{"name":"a","age":7,"mood":null,"tags":["b"]}'
VALID = {
    "compact": COMPACT,
    "with spaces": json.dumps(json.loads(COMPACT)),
    "indented": json.dumps(json.loads(COMPACT), indent=4),
    "indented by tabs": json.dumps(json.loads(COMPACT), indent="\t"),
    "unicode": COMPACT.replace('"a"', '"é 日本 🙂"'),
    "escapes": COMPACT.replace('"a"', r'"\"\\\n\u0007"'),
    "the name of a special token in a string": COMPACT.replace('"a"', r'"<tool_call></think>"'),
    "nested": COMPACT[:-1] + ',"home":{"street":"x","number":null}}',
}
INVALID = {
    "nothing": "",
    "a part": COMPACT[:-1],
    "more": COMPACT + "\n",
    "a line break in a string": COMPACT.replace('"a"', '"a\n"'),
    "half a character in an escape": COMPACT.replace('"a"', r'"\ud83d"'),
    "a wrong escape": COMPACT.replace('"a"', r'"\x"'),
    "a number above the bound": COMPACT.replace("7", "151"),
    "a word that is not listed": COMPACT.replace("null", '"gladly"'),
    "too few items": COMPACT.replace('["b"]', "[]"),
    "too many items": COMPACT.replace('["b"]', '["b","c","d","e"]'),
    "an unknown property": COMPACT[:-1] + ',"x":1}',
    "a missing property": COMPACT.replace('"age":7,', ""),
    "much white space": COMPACT.replace(",", "," + 60 * " "),
    "white space without end": COMPACT.replace(",", "," + 9 * "\n"),
}


@pytest.mark.parametrize("text", VALID.values(), ids=VALID)
def test_json_is_accepted_however_it_is_printed(text: str) -> None:
    assert accepts(COMPILER.json_schema(PERSON), text)


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_what_is_not_of_the_schema_is_refused(text: str) -> None:
    assert not accepts(COMPILER.json_schema(PERSON), text)


def test_stop_ids_are_allowed_just_where_the_text_may_end() -> None:
    constraint = COMPILER.json_schema({"type": "integer", "minimum": 5, "maximum": 123})
    digits = {digit: TOKENIZER.encode(digit)[0] for digit in "123"}
    assert not allowed_tokens(constraint) & set(STOP_IDS)
    constraint.accept(digits["1"])
    assert not allowed_tokens(constraint) & set(STOP_IDS)
    constraint.accept(digits["2"])
    assert allowed_tokens(constraint) > {*STOP_IDS, digits["3"]}
    constraint.accept(digits["3"])
    assert allowed_tokens(constraint) == set(STOP_IDS)


def test_a_walk_tells_a_token_that_was_not_allowed() -> None:
    constraint = COMPILER.json_object()
    with pytest.raises(GrammarError, match=r"token 2271 ends an answer"):
        constraint.accept(2271)
    with pytest.raises(GrammarError, match="does not go on with token"):
        constraint.accept(TOKENIZER.encode("x")[0])
    finished = COMPILER.json_schema({"const": 1})
    for token in (*TOKENIZER.encode("1"), 2273):
        finished.accept(token)
    with pytest.raises(GrammarError, match="follows the end"):
        finished.accept(TOKENIZER.encode("1")[0])


def test_masks_belong_to_the_caller_and_walks_are_apart() -> None:
    first, second = COMPILER.json_object(), COMPILER.json_object()
    before = first.allowed()
    before[:] = 0
    first.accept(TOKENIZER.encode("{")[0])
    assert not np.array_equal(first.allowed(), second.allowed())
    assert TOKENIZER.encode("{")[0] in allowed_tokens(second)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = {
    "a type that is none": ({"type": "strin"}, "strin"),
    "a keyword that no grammar holds": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "a pattern that looks ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "a broken pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "a missing reference": ({"$ref": "#/$defs/none"}, r"\$defs/none"),
    "a reference to elsewhere": ({"$ref": "file:///etc/hostname"}, "does not fetch"),
    "nothing that satisfies it": ({"type": "integer", "minimum": 5, "maximum": 3}, "5.*3"),
    "nested too deeply": (nested(200), "recursion limit"),
    "a reference to itself": ({"$ref": "#"}, "too complex to walk"),
    # Newer interpreters write deeper JSON, and leave it to the library to refuse it.
    "nested beyond the interpreter's stack": (
        nested(5 * sys.getrecursionlimit()),
        "nested too deeply|recursion limit",
    ),
    "too large": ({"enum": [f"value {number}" for number in range(100_000)]}, "too big"),
    "half a character": ({"const": "\ud800"}, "no JSON object"),
    "no JSON": ({"const": float("nan")}, "no JSON object"),
    "no object": (True, "no JSON object"),
}


@pytest.mark.parametrize(("schema", "why"), REFUSED.values(), ids=REFUSED)
def test_a_schema_that_cannot_be_kept_to_is_refused_in_one_line(schema: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        COMPILER.json_schema(schema)
    assert isinstance(caught.value, Qwen35Error)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**9},
        {"type": "string", "pattern": "((a{200}){200}){200}"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {
            "type": "object",
            "properties": {f"property {number}": {"type": "string"} for number in range(1_500)},
        },
    ],
    ids=["long string", "long pattern", "long array", "many properties"],
)
def test_large_bounds_cost_nothing_before_they_are_reached(schema: dict[str, Any]) -> None:
    constraint = COMPILER.json_schema(schema)
    for _ in range(20):
        constraint.accept(max(allowed_tokens(constraint) - set(STOP_IDS)))
    assert not allowed_tokens(constraint) & set(STOP_IDS)


def wide(count: int, kind: str = "integer", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{number}": {"type": kind} for number in range(count)}, **more}


OPTIONAL = MOST_OPTIONAL // 4
LISTED = [f"{number}" for number in range(5_000)]


@pytest.mark.parametrize("kind", ["integer", "boolean"])
@pytest.mark.parametrize("place", ["alone", "in a list"])
def test_as_many_optional_properties_as_are_taken_can_be_walked(kind: str, place: str) -> None:
    value = "12" if kind == "integer" else "true"
    text = f'{{"1":{value}, "3":{value},\n    "{MOST_OPTIONAL - 1}": {value}}}'
    schema = wide(MOST_OPTIONAL, kind)
    if place == "in a list":
        schema, text = {"type": "array", "items": schema}, f"[{text},{text}]"
    assert accepts(COMPILER.json_schema(schema), text)


@pytest.mark.parametrize(
    "schema",
    [
        wide(MOST_OPTIONAL + 1),
        {"type": "array", "items": {"anyOf": [{"type": "null"}, wide(MOST_OPTIONAL + 1)]}},
        {"anyOf": [wide(OPTIONAL, kind) for kind in ("integer", "string", "null", "boolean", "number")]},
        {"$defs": {"a": wide(OPTIONAL)}, "allOf": [{"$ref": "#/$defs/a"}, wide(3 * OPTIONAL + 1)]},
    ],
    ids=["alone", "in a list", "alternatives", "a part that is referred to"],
)
def test_more_optional_properties_are_refused_before_an_answer_begins(schema: dict[str, Any]) -> None:
    with pytest.raises(
        GrammarError, match=f"an object has 2[0-9]+ properties that may be left out.*{MOST_OPTIONAL}"
    ):
        COMPILER.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        wide(5_000, required=LISTED),
        {"type": "object", "properties": {key: wide(OPTIONAL) for key in "abcde"}},
        {"const": wide(MOST_OPTIONAL + 1)},
    ],
    ids=["required", "in several objects", "a value"],
)
def test_what_is_not_left_out_of_one_object_is_not_counted(schema: dict[str, Any]) -> None:
    allowed_tokens(COMPILER.json_schema(schema))


def test_a_grammar_that_grows_too_complex_on_the_way_says_so() -> None:
    small = copy.copy(COMPILER)
    small._limits = llguidance.LLParserLimits(max_items_in_row=300, verbose_errors=False)
    with pytest.raises(GrammarError, match="items") as caught:
        accepts(small.json_schema(wide(200)), '{"1":1')
    assert len(str(caught.value)) < 400


def test_walks_share_the_families_vocabulary(family: FamilyTokenizer) -> None:
    rows = 248_320
    compiler = GrammarCompiler(family.tokenizer, rows, (248_046, 248_044))
    constraint = compiler.json_schema({"type": "string"})
    for token in family.encode('"naïve 毕老师说'):
        words = constraint.allowed()
        assert words.shape == (rows // 32,)
        assert words[token // 32] >> np.uint32(token % 32) & 1
        constraint.accept(token)
    allowed = np.nonzero(np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little"))[0]
    assert allowed.size > 200_000
    texts = [family.bytes_of.get(int(token)) for token in allowed]
    assert all(text is None or b"\n" not in text for text in texts)
    think = {family.tokenizer.token_id("<think>"), family.tokenizer.token_id("</think>")}
    assert {int(token) for token, text in zip(allowed, texts, strict=True) if text is None} == think


def test_other_vocabularies_and_answers_without_an_end_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(GrammarError, match="byte-level"):
        GrammarCompiler(Tokenizer(backend), 2, (1,))
    with pytest.raises(GrammarError, match="no token stops an answer"):
        GrammarCompiler(TOKENIZER, 2_304, (2_304,))


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install 'qwen35-jax\[serve\]'"):
        GrammarCompiler(TOKENIZER, 2_304, STOP_IDS)
