from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat_template import ChatTemplate

SOURCE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
WEATHER = {"name": "weather", "description": "Look up <the> weather & \u00e9t\u00e9"}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(SOURCE)


def tool_loop(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nHello!"},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "20 C"},
    ]


TOOL_LOOP = (
    "<|im_start|>system\n# Tools\n\n<tools>\n"
    '{"name": "weather", "description": "Look up <the> weather & \u00e9t\u00e9"}\n</tools>\n\n'
    "Be brief.<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n"
    "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\nnew\n</think>\n\n"
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
    "<tool_response>\n20 C\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n"
)
ARGUMENTS = {"city": "Paris", "days": [1, 2]}


def test_b86_one_turn_with_and_without_thinking(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    opened = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert template.render(messages) == opened
    assert template.render(messages, enable_thinking=True) == opened
    assert template.render(messages, enable_thinking=False) == opened + "\n</think>\n\n"
    assert template.render(messages, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_b86_thoughts_of_past_turns_are_dropped_and_kept_after_the_last_user_turn(
    template: ChatTemplate,
) -> None:
    assert template.render(tool_loop(ARGUMENTS), tools=[WEATHER]) == TOOL_LOOP


def test_b87_tool_arguments_as_json_text_render_as_the_mapping_does(template: ChatTemplate) -> None:
    assert template.render(tool_loop(json.dumps(ARGUMENTS)), tools=[WEATHER]) == TOOL_LOOP


@pytest.mark.parametrize("arguments", ['{"city": ', "[1, 2]", [1, 2], "3", 3, '"Paris"'])
def test_b87_tool_arguments_that_are_no_object_are_refused_by_message(
    template: ChatTemplate, arguments: Any
) -> None:
    with pytest.raises(
        PromptError, match=r"messages\[4\].tool_calls\[0\].function.arguments of the call of 'weather'"
    ):
        template.render(tool_loop(arguments))


def test_tools_that_are_malformed_are_refused_before_rendering(template: ChatTemplate) -> None:
    with pytest.raises(PromptError, match=r"tools\[0\].name is missing"):
        template.render([{"role": "user", "content": "Hi"}], tools=[{}])


def test_text_parts_render_as_their_text_does(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    rendered = template.render([{"role": "user", "content": parts}])
    assert rendered == template.render([{"role": "user", "content": "Hi there"}])


def test_arguments_nested_too_deeply_to_print_are_refused(template: ChatTemplate) -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(PromptError, match="fails"):
        template.render(tool_loop({"city": nested}))


def test_rendering_leaves_the_messages_as_they_were(template: ChatTemplate) -> None:
    messages = tool_loop(json.dumps(ARGUMENTS))
    before = json.dumps(messages)
    template.render(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "assistant", "content": "Hi"}], "No user query found"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "at the beginning"),
        (
            [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}],
            r"messages\[1\].role is 'robot'",
        ),
        ([{"role": "user", "content": None}], r"messages\[0\].content is missing"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([], "refuses|fails"),
    ],
)
def test_conversations_that_the_template_refuses_are_prompt_errors(
    template: ChatTemplate, messages: list[Any], complaint: str
) -> None:
    with pytest.raises(PromptError, match=complaint):
        template.render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_reach_neither_python_nor_the_messages(source: str) -> None:
    with pytest.raises(PromptError, match=r"refuses|fails"):
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])


def test_a_template_that_does_not_parse_is_refused() -> None:
    with pytest.raises(PromptError, match="not valid"):
        ChatTemplate("{% if %}")


def test_template_file_wins_over_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "from config {{ eos_token }}", "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path).render([]) == "from config <|im_end|>"
    (tmp_path / "chat_template.jinja").write_text("from file {{ eos_token }}")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "from file <|im_end|>"


def test_named_templates_give_the_default_one(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert ChatTemplate.from_folder(tmp_path).render([]) == "plain"


def test_a_template_file_that_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("h\u00e9llo".encode("latin-1"))
    with pytest.raises(PromptError, match=r"chat_template.jinja is not UTF-8 text \(byte 1 is 0xe9\)"):
        ChatTemplate.from_folder(tmp_path)


def test_a_folder_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"neither chat_template.jinja nor a chat_template"):
        ChatTemplate.from_folder(tmp_path)


def test_spans_are_what_the_template_writes_inside_its_generation_blocks(template: ChatTemplate) -> None:
    assert template.marks_generation
    messages = [*tool_loop(ARGUMENTS), {"role": "assistant", "content": "Nice \ufdd0."}]
    text, spans = template.render_with_spans(messages, tools=[WEATHER])
    assert text == template.render(messages, tools=[WEATHER], add_generation_prompt=False)
    assert [text[begin:end] for begin, end in spans] == [
        "Hello!<|im_end|>\n",
        TOOL_LOOP[TOOL_LOOP.index("<think>\nnew") : TOOL_LOOP.index("<|im_start|>user\n<tool_response>")],
        "<think>\n\n</think>\n\nNice \ufdd0.<|im_end|>\n",
    ]


def test_a_template_without_generation_blocks_has_no_spans() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert not template.marks_generation
    assert template.render_with_spans([{"role": "user", "content": "Hi"}]) == ("Hi", [])


@pytest.mark.parametrize(
    "source",
    [
        "{% set said %}{% generation %} a {% endgeneration %}{% endset %}{{ said | trim }}",
        "{% set said %}{% generation %}a{% endgeneration %}{% endset %}{{ said | length }}",
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    ],
)
def test_spans_that_do_not_end_up_as_they_were_written_are_refused(source: str) -> None:
    with pytest.raises(PromptError, match="changes what they have written"):
        ChatTemplate(source).render_with_spans([{"role": "user", "content": "Hi"}])


@pytest.mark.reference
def test_spans_equal_those_of_transformers(template: ChatTemplate) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*tool_loop(ARGUMENTS), {"role": "assistant", "content": "Nice."}]
    (text,), (spans,) = render_jinja_template(
        [messages], chat_template=SOURCE, tools=[WEATHER], return_assistant_tokens_mask=True
    )
    assert template.render_with_spans(messages, tools=[WEATHER]) == (text, [tuple(span) for span in spans])


@pytest.mark.reference
@pytest.mark.parametrize("thinking", [True, False])
def test_b86_rendering_equals_that_of_transformers(template: ChatTemplate, thinking: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in (tool_loop(ARGUMENTS), tool_loop(ARGUMENTS)[:4], tool_loop(ARGUMENTS)[1:2]):
        for tools in (None, [WEATHER]):
            (expected,), _ = render_jinja_template(
                [messages],
                chat_template=SOURCE,
                tools=tools,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            assert template.render(messages, tools=tools, enable_thinking=thinking) == expected
