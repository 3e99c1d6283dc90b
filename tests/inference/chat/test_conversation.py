"""Several turns with the built-in model: what is kept, what is forgotten, and what the next answer sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.inference.chat.answer_parser import AnswerEvent, Content, ParsedAnswer
from qwen35_jax.inference.chat.conversation import ContextFullError, Conversation, Turn
from qwen35_jax.inference.chat_template import ChatTemplate, encode_chat
from qwen35_jax.inference.engine import Engine
from qwen35_jax.inference.engine.prefix_cache import BLOCK
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.stop_tokens import stop_token_ids
from qwen35_jax.inference.tokenizer import Tokenizer
from tests.inference.tiny_model import TinyModel

FRANCE = "What is the capital of France?"
PERU = "What is the capital of Peru?"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(find_model("nano"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_folder(find_model("nano"))


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[Engine]:
    with Engine(load("nano"), tokenizer, slots=1, warm_up=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    return stop_token_ids(find_model("nano"), config_ids=(), tokenizer=tokenizer)


@pytest.fixture
def conversation(
    engine: Engine, tokenizer: Tokenizer, template: ChatTemplate, stop_ids: tuple[int, ...]
) -> Conversation:
    settings = GenerationSettings(max_new_tokens=40)
    return Conversation(engine, tokenizer, template, settings=settings, stop_ids=stop_ids)


def prompt_of(turn: Turn) -> list[int]:
    assert turn.result is not None
    return list(turn.result.generations[0].prompt_tokens)


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


@pytest.mark.usefixtures("compiled_quickly")
def test_b35_turns_go_on_from_the_turns_before_them_with_the_answers_of_plain_generation(
    tiny: TinyModel, ascii_tokenizer: Tokenizer
) -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}[assistant: ")
    settings, stop_ids = GenerationSettings(max_new_tokens=12, temperature=0.9, seed=5), (7, 95)
    results = []
    with Engine(tiny, ascii_tokenizer, slots=1, prefill_tokens=32, warm_up=False) as engine:
        conversation = Conversation(engine, ascii_tokenizer, template, stop_ids=stop_ids, settings=settings)
        for question in ("It is late, ", "and " * 9, "why?", "Because " * 11, "when?"):
            result = conversation.ask(question).result
            assert result is not None
            results.append(result)
    found = [result.generations[0] for result in results]
    prompts = [each.prompt_tokens for each in found]
    plain = generate(tiny, prompts, settings, tokenizer=ascii_tokenizer, stop_ids=stop_ids)
    assert [each.tokens for each in found] == [each.tokens for each in plain.generations]
    for result, generation in zip(results, found, strict=True):
        assert result.timing.prefill_tokens == len(generation.prompt_tokens) - generation.cached_tokens
        assert result.timing.decode_tokens == len(generation.tokens) - 1
    assert len(prompts[-1]) > 3 * BLOCK
    for before, after in itertools.pairwise(found):
        assert after.cached_tokens >= len(before.prompt_tokens) // BLOCK * BLOCK


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came_and_the_engine_goes_on(
    conversation: Conversation, engine: Engine
) -> None:
    def stop_after_a_word(event: AnswerEvent) -> None:
        shown.append(event)
        if len(shown) == 2:
            conversation.stop()

    def interrupt_after_a_word(event: AnswerEvent) -> None:
        shown.append(event)
        if len(shown) == 2:
            raise KeyboardInterrupt

    whole = conversation.ask(FRANCE)
    for way in (stop_after_a_word, interrupt_after_a_word):
        shown: list[AnswerEvent] = []
        conversation.reset()
        stopped = conversation.ask(FRANCE, way)
        assert stopped.result is None
        assert whole.answer.content.startswith(stopped.answer.content)
        assert 0 < len(stopped.answer.content) < len(whole.answer.content)
        assert stopped.answer.content == "".join(event.text for event in shown if isinstance(event, Content))
        assert conversation.messages[1:] == [{"role": "assistant", "content": stopped.answer.content}]
    conversation.reset()
    assert conversation.ask(FRANCE).answer == whole.answer
    assert engine.healthy


def test_an_answer_that_is_stopped_is_cancelled_in_the_engine(
    engine: Engine, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    conversation = Conversation(engine, tokenizer, template, stop_ids=())
    before = engine.statistics().cancelled
    # Longer than what the engine can have drawn by the time it hears of it.
    conversation.ask(FRANCE, lambda event: conversation.stop())
    conversation.reset()
    conversation.ask(FRANCE, lambda event: conversation.stop())  # waits for the slot
    assert engine.statistics().cancelled > before


def test_a_question_stopped_before_its_answer_is_forgotten(
    conversation: Conversation, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "submit", interrupted)
    assert conversation.ask(FRANCE) == Turn(ParsedAnswer(), None)
    assert conversation.messages == []


def test_a_full_context_is_told_and_leaves_the_conversation_as_it_was(
    conversation: Conversation, engine: Engine
) -> None:
    conversation.ask(FRANCE)
    before = list(conversation.messages)
    context = engine.memory.context
    with pytest.raises(ContextFullError, match=f"tokens, and its context is {context}"):
        conversation.ask("word " * context)
    assert conversation.messages == before


def test_an_answer_gets_what_the_context_leaves_if_that_is_less_than_asked_for(
    engine: Engine, tokenizer: Tokenizer, template: ChatTemplate, stop_ids: tuple[int, ...]
) -> None:
    context = engine.memory.context
    question = "a" * 3
    while True:
        longer = question + " a a a a"
        length = len(encode_chat(template, tokenizer, [{"role": "user", "content": longer}]))
        if length > context - 3:
            break
        question = longer
    settings = GenerationSettings(max_new_tokens=500, min_new_tokens=200)
    turn = Conversation(engine, tokenizer, template, settings=settings, stop_ids=stop_ids).ask(question)
    assert turn.result is not None
    (generation,) = turn.result.generations
    assert len(generation.prompt_tokens) + len(generation.tokens) == context
    assert generation.finish_reason == "length"


def test_b86_thoughts_are_told_apart_and_not_sent_again(
    engine: Engine, tokenizer: Tokenizer, template: ChatTemplate, stop_ids: tuple[int, ...]
) -> None:
    settings = GenerationSettings(max_new_tokens=12, min_new_tokens=12)
    conversation = Conversation(
        engine, tokenizer, template, settings=settings, stop_ids=stop_ids, enable_thinking=True
    )
    thought = conversation.ask(FRANCE).answer
    assert thought.reasoning
    assert conversation.messages[1]["reasoning_content"] == thought.reasoning
    second = tokenizer.decode(prompt_of(conversation.ask(PERU)), skip_special_tokens=False)
    assert thought.reasoning not in second
    assert second.endswith("<think>\n")
