"""The evaluation harness on the built-in model: tasks of ours, and their numbers computed again without it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before the harness and what it brings start: nothing is looked up on the network.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import jax
import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import qwen35_jax
from qwen35_jax.checkpoint import LoadedModel
from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.lm_eval import Qwen35LM
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.model import forward

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "lm_eval_tasks"
CHOOSE, WRITE, READ = "qwen35_choose_capital", "qwen35_write_capital", "qwen35_read_texts"
COUNTRIES = ("France", "Peru", "India", "Norway", "Egypt")


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly() -> Iterator[None]:
    """Compiling takes most of the time of these tests."""
    optimizations_left_out = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", optimizations_left_out)


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return qwen35_jax.load("nano", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(nano: LoadedModel) -> Tokenizer:
    return Tokenizer.from_folder(nano.folder)


@pytest.fixture(scope="module")
def adapter(nano: LoadedModel) -> Qwen35LM:
    return Qwen35LM(nano, batch_size=4, max_length=64, max_gen_toks=12)


@pytest.fixture(scope="module")
def evaluation(adapter: Qwen35LM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All three tasks, run by the harness."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        evaluation = lm_eval.simple_evaluate(
            model=adapter,
            tasks=[CHOOSE, WRITE, READ],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
        )
    assert evaluation is not None
    return evaluation


def logprobs(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    """Of each token but the first, from one pass over all of them."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    table = jax.nn.log_softmax(
        jax.jit(forward, static_argnums=0)(model.graphdef, model.parameters, padded)[0]
    )
    return np.asarray(table)[np.arange(len(tokens) - 1), tokens[1:]].astype(np.float64)


def test_choices_get_the_log_probabilities_of_the_model(
    evaluation: dict[str, Any], nano: LoadedModel, tokenizer: Tokenizer
) -> None:
    samples = evaluation["samples"][CHOOSE]
    assert len(samples) == 5
    for sample in samples:
        question = tokenizer.encode(f"The capital of {sample['doc']['country']} is")
        totals = []
        for choice, ((total, greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = tokenizer.encode(f"The capital of {sample['doc']['country']} is {choice}")
            expected = logprobs(nano, whole)[len(question) - 1 :]
            assert total == pytest.approx(expected.sum(), abs=1e-4)
            assert not greedy or expected.sum() > math.log(0.5) * len(expected)
            totals.append(expected.sum())
        assert sample["acc"] == (int(np.argmax(totals)) == sample["doc"]["answer"])
    assert evaluation["results"][CHOOSE]["acc,none"] == 1.0


def test_answers_are_those_of_generate(
    evaluation: dict[str, Any], nano: LoadedModel, tokenizer: Tokenizer
) -> None:
    prompts = [f"The capital of {country}" for country in COUNTRIES]
    settings = GenerationSettings(max_new_tokens=12, stop=(".",))
    expected = [row.text for row in generate(nano, prompts, settings).generations]
    assert [sample["resps"] for sample in evaluation["samples"][WRITE]] == [[[text]] for text in expected]
    assert evaluation["results"][WRITE]["exact_match,none"] == 1.0


def test_rolling_texts_get_the_log_probabilities_of_the_harness_windows(
    evaluation: dict[str, Any], nano: LoadedModel, tokenizer: Tokenizer
) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    total, nbytes, words = 0.0, 0, 0
    for sample in evaluation["samples"][READ]:
        text = sample["doc"]["text"]
        tokens = [end, *tokenizer.encode(text)]
        assert len(tokens) < 64  # one window
        total += logprobs(nano, tokens).sum()
        nbytes += len(text.encode())
        words += len(text.split())
    results = evaluation["results"][READ]
    assert results["bits_per_byte,none"] == pytest.approx(-total / nbytes / math.log(2), rel=1e-5)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(-total / nbytes), rel=1e-5)
    assert results["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)


def requested(kind: Any, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_texts_longer_than_the_context_are_cut_into_windows(nano: LoadedModel, tokenizer: Tokenizer) -> None:
    text = "The capital of Peru is Lima. " * 3
    tokens = tokenizer.encode(text)
    short = Qwen35LM(nano, batch_size=4, max_length=10)
    (found,) = short.loglikelihood_rolling([requested("loglikelihood_rolling", text)], disable_tqdm=True)
    read = [short.prefix_token_id, *tokens]
    expected, scored = 0.0, 0
    while scored < len(tokens):  # windows of 10 that read; the last one reads back to fill itself
        end = min(scored + 10, len(tokens))
        start = max(0, end - 10)
        expected += logprobs(nano, read[start : end + 1])[scored - start :].sum()
        scored = end
    assert len(tokens) > 20
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning(
    nano: LoadedModel, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    short = Qwen35LM(nano, batch_size=1, max_length=10)
    context, continuation = "The capital of France is Paris. The capital of Peru is", " Lima"
    ((found, _),) = short.loglikelihood(
        [requested("loglikelihood", context, continuation)], disable_tqdm=True
    )
    whole = tokenizer.encode(context + continuation)
    asked = len(whole) - len(tokenizer.encode(context))
    assert len(whole) > 11
    assert found == pytest.approx(logprobs(nano, whole[-11:])[-asked:].sum(), abs=1e-4)
    assert "is cut to its last" in caplog.text


def test_an_empty_context_is_the_end_of_a_text(
    adapter: Qwen35LM, nano: LoadedModel, tokenizer: Tokenizer
) -> None:
    ((found, _),) = adapter.loglikelihood([requested("loglikelihood", "", "The capital")], disable_tqdm=True)
    expected = logprobs(nano, [adapter.prefix_token_id, *tokenizer.encode("The capital")]).sum()
    assert adapter.prefix_token_id == tokenizer.eos_token_id
    assert found == pytest.approx(expected, abs=1e-4)


def test_tasks_say_how_answers_are_drawn_and_end(adapter: Qwen35LM, tokenizer: Tokenizer) -> None:
    greedy = adapter._request(
        "The capital", {"until": ["\n", "<|im_end|>", "a"], "temperature": 0.7, "do_sample": False}
    )
    assert greedy.settings.temperature == 0 and greedy.settings.max_new_tokens == 12
    assert greedy.settings.stop == ("\n", "a")  # "a" is a token, but not a special one
    assert tokenizer.eos_token_id in greedy.stop_ids
    sampled = adapter._request(
        "The capital", {"until": "\n", "do_sample": True, "top_p": 0.9, "max_tokens": 7}
    )
    assert sampled.settings.temperature == 1 and sampled.settings.top_p == 0.9
    assert sampled.settings.max_new_tokens == 7 and sampled.settings.stop == ("\n",)
    assert adapter._request("x", {"temperature": 0.5}).settings.temperature == 0.5
    drawn = [adapter._request("x", {"temperature": 0.5}).settings.seed for _ in range(5)]
    assert len(set(drawn)) == 5  # repeats of one request differ
    assert len(adapter._request("word " * 100, {}).prompt) == 64 - 12
    assert adapter._request("", {}).prompt == (adapter.prefix_token_id,)
    with pytest.raises(PromptError, match="num_beams cannot be followed"):
        adapter._request("x", {"num_beams": 4})
    with pytest.raises(PromptError, match="no room for a prompt"):
        adapter._request("x", {"max_gen_toks": 64})


def test_chats_go_through_the_checkpoints_template(adapter: Qwen35LM, nano: LoadedModel) -> None:
    template = ChatTemplate.from_folder(nano.folder)
    messages = [{"role": "user", "content": "What is the capital of Peru?"}]
    assert adapter.apply_chat_template(messages) == template.render(messages)
    begun = [*messages, {"role": "assistant", "content": "The capital is"}]
    opened = adapter.apply_chat_template(begun, add_generation_prompt=False)
    assert opened.endswith("The capital is") and opened.startswith(template.render(messages)[:40])
    assert adapter.chat_template(True) == (nano.folder / "chat_template.jinja").read_text(encoding="utf-8")
    assert adapter.chat_template(False) is None
    thinking = Qwen35LM(nano, enable_thinking=True)
    assert thinking.apply_chat_template(messages) == template.render(messages, enable_thinking=True)
    assert "/" not in adapter.tokenizer_name


def test_thoughts_are_left_out_and_do_not_meet_the_stop_strings(nano: LoadedModel) -> None:
    asked = [
        requested("generate_until", f"The capital of {country}", {"until": [country, "!"], "max_gen_toks": 6})
        for country in COUNTRIES[:4]
    ]
    sizes: dict[str, Any] = {"batch_size": 4, "max_length": 64}
    plain = Qwen35LM(nano, **sizes).generate_until(asked, disable_tqdm=True)
    assert plain[1] == " is Lima."
    after = Qwen35LM(nano, **sizes, think_end_token=" is").generate_until(asked, disable_tqdm=True)
    assert after == [text.removeprefix(" is ") for text in plain]
    asked = [requested("generate_until", one.args[0], one.args[1] | {"until": [" is", "i"]}) for one in asked]
    after = Qwen35LM(nano, **sizes, think_end_token=" is").generate_until(asked, disable_tqdm=True)
    assert after == [text.removeprefix(" is ").partition("i")[0] for text in plain]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": 4096}, "max_length is 4096, expected 2 to 2048"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(
    nano: LoadedModel, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PromptError, match=complaint):
        Qwen35LM(nano, **arguments)


def test_auto_takes_the_default_batch_or_the_most_that_is_allowed(nano: LoadedModel) -> None:
    assert Qwen35LM(nano, batch_size="auto").batch_size == 8
    assert Qwen35LM(nano, batch_size="auto:4", max_batch_size=3).batch_size == 3
    assert Qwen35LM(nano, batch_size="5").batch_size == 5


def test_the_harness_finds_the_model_by_name_and_its_own_ones_still() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("qwen35_jax") is Qwen35LM
    assert get_model("dummy").__name__ == "DummyLM"


def test_the_package_works_without_the_harness() -> None:
    code = "import sys, qwen35_jax.inference, qwen35_jax.cli.main; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.extended
def test_the_command_line_of_the_harness_runs_with_this_model(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "qwen35_jax.inference.lm_eval", "--model", "qwen35_jax"),
        *("--model_args", "model=nano", "--batch_size", "4", "--apply_chat_template"),
        *("--include_path", str(TASKS), "--tasks", CHOOSE, "--limit", "2"),
    ]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "qwen35_jax" in done.stdout and "acc" in done.stdout
