"""Several turns with the built-in model: what is kept, what is forgotten, and what the next answer sees."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.checkpoint.source import LoadedModel
from qwen35_jax.inference.chat.answer_parser import AnswerEvent, Content, ParsedAnswer
from qwen35_jax.inference.chat.conversation import ContextFullError, Conversation, Turn
from qwen35_jax.inference.chat_template import ChatTemplate, encode_chat
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer

FRANCE = "What is the capital of France?"
PERU = "What is the capital of Peru?"


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("nano")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(find_model("nano"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_folder(find_model("nano"))


@pytest.fixture
def conversation(nano: LoadedModel, tokenizer: Tokenizer, template: ChatTemplate) -> Conversation:
    return Conversation(nano, tokenizer, template, settings=GenerationSettings(max_new_tokens=40))


def prompt_of(turn: Turn) -> list[int]:
    assert turn.result is not None
    return list(turn.result.generations[0].prompt_tokens)


def interrupt(event: AnswerEvent) -> None:
    raise KeyboardInterrupt


def test_each_question_is_answered_after_all_turns_before_it(
    conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    events: list[AnswerEvent] = []
    conversation.system = "Be brief."
    first = conversation.ask(FRANCE, events.append)
    assert "Paris" in first.answer.content
    assert len(events) > 1
    assert first.answer.content == "".join(event.text for event in events if isinstance(event, Content))
    second = conversation.ask(PERU)
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert prompt_of(second) == encode_chat(template, tokenizer, conversation.all_messages[:-1])
    assert conversation.all_messages[0] == {"role": "system", "content": "Be brief."}
    conversation.reset()
    assert conversation.messages == []
    again = conversation.ask(FRANCE)
    assert (prompt_of(again), again.answer) == (prompt_of(first), first.answer)


def test_an_interrupted_answer_is_kept_as_far_as_it_came_and_the_model_goes_on(
    conversation: Conversation,
) -> None:
    def interrupt_after_a_word(event: AnswerEvent) -> None:
        shown.append(event)
        if len(shown) == 2:
            raise KeyboardInterrupt

    shown: list[AnswerEvent] = []
    whole = conversation.ask(FRANCE)
    conversation.reset()
    stopped = conversation.ask(FRANCE, interrupt_after_a_word)
    assert stopped.result is None
    assert whole.answer.content.startswith(stopped.answer.content)
    assert 0 < len(stopped.answer.content) < len(whole.answer.content)
    assert conversation.messages[1:] == [{"role": "assistant", "content": stopped.answer.content}]
    conversation.reset()
    assert conversation.ask(FRANCE).answer == whole.answer


def test_a_question_stopped_before_its_answer_is_forgotten(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen35_jax.inference.chat.conversation.generate", stopped)
    assert conversation.ask(FRANCE) == Turn(ParsedAnswer(), None)
    assert conversation.messages == []


def test_a_full_context_is_told_and_leaves_the_conversation_as_it_was(
    conversation: Conversation, nano: LoadedModel
) -> None:
    conversation.ask(FRANCE)
    before = list(conversation.messages)
    context = nano.config.text.max_context
    with pytest.raises(ContextFullError, match=f"tokens, and the model's context is {context}"):
        conversation.ask("word " * context)
    assert conversation.messages == before


def test_an_answer_gets_what_the_context_leaves_if_that_is_less_than_asked_for(
    nano: LoadedModel, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    context = nano.config.text.max_context
    question = "a" * 3
    while True:
        longer = question + " a a a a"
        length = len(encode_chat(template, tokenizer, [{"role": "user", "content": longer}]))
        if length > context - 3:
            break
        question = longer
    settings = GenerationSettings(max_new_tokens=500, min_new_tokens=200)
    turn = Conversation(nano, tokenizer, template, settings=settings).ask(question)
    assert turn.result is not None
    (generation,) = turn.result.generations
    assert len(generation.prompt_tokens) + len(generation.tokens) == context
    assert generation.finish_reason == "length"


def test_b86_thoughts_are_told_apart_and_not_sent_again(
    nano: LoadedModel, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    settings = GenerationSettings(max_new_tokens=12, min_new_tokens=12)
    conversation = Conversation(nano, tokenizer, template, settings=settings, enable_thinking=True)
    thought = conversation.ask(FRANCE).answer
    assert thought.reasoning
    assert conversation.messages[1]["reasoning_content"] == thought.reasoning
    second = tokenizer.decode(prompt_of(conversation.ask(PERU)), skip_special_tokens=False)
    assert thought.reasoning not in second
    assert second.endswith("<think>\n")
