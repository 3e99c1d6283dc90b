"""From records to documents: what is learned of each form, and what is skipped and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.errors import ConfigError
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.chat_spans import ChatDocuments
from qwen35_jax.training.dataset import Dataset, make_dataset
from qwen35_jax.training.records import AnyForm, Chat, Completion, DataError, Parts, Record, Text

TOKENIZER = Tokenizer.from_folder(find_model("nano"))
CHATS = ChatDocuments(ChatTemplate.from_folder(find_model("nano")), TOKENIZER)
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
END = TOKENIZER.token_id("<|endoftext|>")
STOP = TOKENIZER.token_id("<|im_end|>")


def chat(*answers: dict[str, Any]) -> Chat:
    messages = [message for answer in answers for message in (QUESTION, {"role": "assistant"} | answer)]
    return Chat(messages, None)


def dataset(*contents: AnyForm, context: int = 200, **options: Any) -> Dataset:
    records = [Record(f"data.jsonl, line {number}", content) for number, content in enumerate(contents, 1)]
    return make_dataset(records, TOKENIZER, CHATS, context=context, **options)


def test_b83_all_of_a_text_but_its_first_token_is_learned_and_one_stop_token() -> None:
    (document,) = dataset(Text("Once upon a time")).documents
    tokens = TOKENIZER.encode("Once upon a time")
    assert document.tokens.tolist() == [*tokens, END]
    assert document.trained.tolist() == [False] + [True] * len(tokens)


def test_b83_a_text_that_ends_with_the_stop_token_gets_no_second_one() -> None:
    (document,) = dataset(Text("a time<|endoftext|>")).documents
    assert document.tokens.tolist() == [*TOKENIZER.encode("a time"), END]
    assert document.trained[-1]


def test_b83_of_a_completion_its_own_tokens_and_the_stop_token_are_learned() -> None:
    (document,) = dataset(Completion("2 + 2 =\n", "\n 4")).documents
    known, tokens = TOKENIZER.encode("2 + 2 =\n"), TOKENIZER.encode("\n 4")
    assert document.tokens.tolist() == [*known, *tokens, END]
    assert document.trained.tolist() == [False] * len(known) + [True] * (len(tokens) + 1)


def test_parts_are_one_text_of_which_a_token_weighs_what_the_part_that_it_ends_in_does() -> None:
    text = "<|im_start|>user\nWho is there?<|im_end|>\n"
    ids = TOKENIZER.encode(text)
    ends = [len(TOKENIZER.decode(ids[: count + 1], skip_special_tokens=False)) for count in range(len(ids))]
    for cut in range(1, len(text)):
        parts = Parts(((text[:cut], 0.5), ("", 9.0), (text[cut:], 2.0)))
        (document,) = dataset(parts).documents
        assert document.tokens.tolist() == ids
        assert document.weights.tolist() == [0, *(0.5 if end <= cut else 2.0 for end in ends[1:])]


def test_parts_of_weight_0_are_not_trained_and_a_cut_keeps_the_weights_of_the_rest() -> None:
    parts = Parts((("one two three", 0.0), (" four", 0.25), (" five six", 3.0)))
    (document,), summary = dataset(parts)
    assert summary.trained_tokens == document.trained.sum() == (document.weights > 0).sum() > 2
    length = int(np.flatnonzero(document.trained)[0]) + 1
    (cut,) = dataset(parts, context=length, too_long="cut").documents
    assert cut.weights.tolist() == [0.0] * (length - 1) + [0.25]
    _, summary = dataset(Text("a time"), Parts((("one two", 0.0),)), Parts((("", 1.0),)))
    assert (summary.untrained.count, summary.untrained.first) == (2, "data.jsonl, line 2")


def test_a_completion_of_no_prompt_is_learned_but_for_its_first_token() -> None:
    (document,) = dataset(Completion("", "4 it is")).documents
    assert document.trained.tolist() == [False] + [True] * (len(document.tokens) - 1)


def test_without_an_end_of_texts_the_end_token_of_the_config_stands_in() -> None:
    def made(tokenizer: Tokenizer) -> Any:
        return (
            make_dataset([Record("line 1", Text("a time"))], tokenizer, None, context=9).documents[0].tokens
        )

    class WithoutEndOfText(Tokenizer):
        def token_id(self, token: str) -> int | None:
            return None if token == "<|endoftext|>" else super().token_id(token)

    assert made(WithoutEndOfText(TOKENIZER.backend, TOKENIZER.config))[-1] == STOP
    with pytest.raises(DataError, match=r"neither <\|endoftext\|> nor an eos_token"):
        made(WithoutEndOfText(TOKENIZER.backend))


@pytest.mark.parametrize(
    "answer",
    [
        {"content": ""},
        {"content": None},
        {"content": " \n", "tool_calls": []},
        {"content": "", "reasoning_content": "hm"},
        {"content": "<think>\nhm\n</think>\n\n"},
    ],
)
def test_a_chat_with_an_empty_answer_is_skipped_and_counted(answer: dict[str, Any]) -> None:
    messages = chat({"content": "4"}, answer | {"content": answer["content"] or ""}).messages
    documents, summary = dataset(Text("a time"), Chat(messages, None), Completion("a", " "))
    assert len(documents) == 1
    assert (summary.empty_answers.count, summary.empty_answers.first) == (2, "data.jsonl, line 2")


def test_an_answer_that_only_calls_a_function_is_not_empty() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    documents, summary = dataset(chat({"content": "", "tool_calls": [call]}))
    assert len(documents) == 1
    assert summary.empty_answers.count == 0


def test_records_of_which_nothing_is_learned_are_skipped_and_counted() -> None:
    documents, summary = dataset(Chat([QUESTION], None), Text(""), Text("a time"))
    assert len(documents) == 1
    assert (summary.untrained.count, summary.untrained.first) == (2, "data.jsonl, line 1")


def test_a_document_longer_than_the_context_is_dropped_and_counted() -> None:
    length = len(TOKENIZER.encode("one two three")) + 1
    documents, summary = dataset(Text("one two three four"), Text("one two three"), context=length)
    assert [len(document.tokens) for document in documents] == [length]
    assert (summary.dropped.count, summary.dropped.first, summary.cut.count) == (1, "data.jsonl, line 1", 0)


def test_a_document_longer_than_the_context_is_cut_if_asked_and_counted() -> None:
    length = len(TOKENIZER.encode("one two three")) + 1
    documents, summary = dataset(
        Text("one two three"), Text("one two three four five"), context=length, too_long="cut"
    )
    assert [len(document.tokens) for document in documents] == [length, length]
    whole = dataset(Text("one two three four five")).documents[0]
    assert documents[1].tokens.tolist() == whole.tokens[:length].tolist()
    assert END not in documents[1].tokens
    assert (summary.cut.count, summary.cut.first, summary.dropped.count) == (1, "data.jsonl, line 2", 0)


def test_a_document_of_which_the_cut_leaves_nothing_to_learn_is_untrained() -> None:
    long_question = Chat(
        [{"role": "user", "content": "word " * 50}, *chat({"content": "4"}).messages[1:]], None
    )
    documents, summary = dataset(long_question, Text("a time"), context=20, too_long="cut")
    assert len(documents) == 1
    assert (summary.untrained.count, summary.cut.count) == (1, 0)


def test_the_summary_counts_and_says_so_in_one_line() -> None:
    documents, summary = dataset(
        Text("a time"), chat({"content": ""}), Chat([QUESTION], None), Text("long " * 300)
    )
    tokens = sum(len(document.tokens) for document in documents)
    trained = sum(int(document.trained.sum()) for document in documents)
    assert (summary.tokens, summary.trained_tokens) == (tokens, trained)
    assert str(summary) == (
        f"1 of 4 records, {trained} of {tokens} tokens trained; "
        "1 dropped as longer than the context (first: data.jsonl, line 4); "
        "1 skipped for an empty answer (first: data.jsonl, line 2); "
        "1 skipped with nothing to train (first: data.jsonl, line 3)"
    )


def test_data_that_leave_nothing_are_refused_with_the_account() -> None:
    with pytest.raises(DataError, match=r"nothing to train: 0 of 1 records.*line 1"):
        dataset(Chat([QUESTION], None))


def test_a_chat_that_the_template_refuses_is_named() -> None:
    late = {"role": "system", "content": "Be brief."}
    content = Chat([*chat({"content": "4"}).messages, late], None)
    with pytest.raises(DataError, match=r"data.jsonl, line 2: .*A system message must come first"):
        dataset(Text("a time"), content)


def test_a_chat_for_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match=r"line 1: the model has no chat template"):
        make_dataset([Record("line 1", chat({"content": "4"}))], TOKENIZER, None, context=9)


@pytest.mark.parametrize(
    ("options", "complaint"), [({"context": 1}, "context is 1"), ({"too_long": "wrap"}, "too_long is 'wrap'")]
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dataset(Text("a time"), **options)
