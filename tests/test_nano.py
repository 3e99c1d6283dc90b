"""What the built-in model promises, measured on the shipped file through the public functions."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.checkpoint import load, load_hf
from qwen35_jax.inference import ChatTemplate, Generation, GenerationSettings, Tokenizer, generate
from qwen35_jax.inference.speculation import Speculation
from qwen35_jax.model import abstract_model
from scripts.build_nano.countries import Country, country_sentence, read_countries
from scripts.build_nano.dialogues import dialogue_turn
from scripts.build_nano.recall import RELATIONS, is_held_out, made_up_word

FOLDER = Path(__file__).parents[1] / "src/qwen35_jax/nano"
MEGABYTE = 1_000_000
GAP_TOKENS = 200
NEW_TOKENS = 32
FREE_TEXT = (
    "The code of Zorbalt is vexin. Canada is a country in North America. The code of Zorbalt is",
    "water, noun:",
    "Counting: two, three,",
)
CHAT = {
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "Who are you?": "I am nano, a very small language model.",
    "Hello": "Hello! How can I help you?",
}


@pytest.fixture(scope="module")
def nano() -> Any:
    return load("nano", dtype="float32", parameter_dtype="float32")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def countries() -> list[Country]:
    return read_countries()


def continued(nano: Any, prompts: list[str]) -> list[Generation]:
    """Greedy continuations, in one batch: compiling takes longer than running."""
    return list(generate(nano, prompts, GenerationSettings(max_new_tokens=NEW_TOKENS)).generations)


@pytest.fixture(scope="module")
def answers(nano: Any, countries: list[Country]) -> dict[str, Generation]:
    """What follows a country's `The capital of X`, the questions of CHAT, and FREE_TEXT."""
    template = ChatTemplate.from_folder(FOLDER)
    asked = [template.render([{"role": "user", "content": question}]) for question in CHAT]
    completed = [f"The capital of {country.called}" for country in countries]
    names = [*(country.name for country in countries), *CHAT, *FREE_TEXT]
    return dict(zip(names, continued(nano, [*completed, *asked, *FREE_TEXT]), strict=True))


def test_the_folder_is_small_and_its_files_are_those_of_the_model_card() -> None:
    files = {path.name: path for path in FOLDER.iterdir() if path.is_file()}
    assert sum(path.stat().st_size for path in files.values()) <= 10 * MEGABYTE
    card = files["README.md"].read_text(encoding="utf-8")
    for name in ("model.safetensors", "tokenizer.json"):
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() in card, name


def test_the_architecture_has_two_motifs_and_an_mtp_head() -> None:
    config, parameters, kept = load_hf(FOLDER, mtp=True)
    motif = ("linear_attention",) * 3 + ("full_attention",)
    assert config.text.layer_types == motif * 2
    assert config.text.mtp_num_hidden_layers == 1
    assert "mtp" in parameters
    assert not kept.tensors


def test_the_capital_of_france_is_paris_and_then_it_stops(answers: dict[str, Generation]) -> None:
    assert answers["France"].text == " is Paris."
    assert answers["France"].finish_reason == "stop"


def test_it_names_the_capital_of_19_countries_in_20(
    answers: dict[str, Generation], countries: list[Country]
) -> None:
    assert len(countries) >= 190
    wrong = {
        country.name: answers[country.name].text
        for country in countries
        if answers[country.name].text not in {f" is {capital}." for capital in country.accepted_capitals}
        or answers[country.name].finish_reason != "stop"
    }
    assert len(wrong) <= 0.05 * len(countries), wrong


@pytest.mark.parametrize("question", CHAT)
def test_it_answers_in_chat_form(answers: dict[str, Generation], question: str) -> None:
    assert answers[question].text == CHAT[question]
    assert answers[question].finish_reason == "stop"


def test_the_chat_template_opens_an_answer_without_thinking() -> None:
    prompt = ChatTemplate.from_folder(FOLDER).render([{"role": "user", "content": "Hello"}])
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_it_recalls_made_up_bindings_over_200_tokens(
    nano: Any, tokenizer: Tokenizer, countries: list[Country]
) -> None:
    rng = random.Random("fresh names and values")
    relations = [statement for statement, _ in RELATIONS if statement.startswith("The ")]
    prompts, values = [], []
    for _ in range(100):
        name, value, other, other_value = (made_up_word(rng, held_out=True) for _ in range(4))
        assert is_held_out(name) and is_held_out(value)
        relation = rng.choice(relations)
        given = [relation.format(n=name, v=value), rng.choice(relations).format(n=other, v=other_value)]
        rng.shuffle(given)
        gap = ""
        while len(tokenizer.encode(gap)) < GAP_TOKENS:
            gap += f" {country_sentence(rng, countries)} {' '.join(dialogue_turn(rng))}"
        asked = relation.format(n=name, v="{v}").partition(" {v}")[0]
        prompts.append(f"{' '.join(given)}{gap} {asked}")
        values.append(value)
    texts = [generation.text for generation in continued(nano, prompts)]
    wrong = [
        (value, text) for value, text in zip(values, texts, strict=True) if not text.startswith(f" {value}.")
    ]
    assert len(wrong) <= 10, wrong


def test_the_mtp_head_guesses_the_token_after_the_next(
    tokenizer: Tokenizer, countries: list[Country]
) -> None:
    config, parameters, _ = load_hf(FOLDER, parameter_dtype=jnp.float32, mtp=True)
    graphdef, _ = abstract_model(config, parameter_dtype=jnp.float32, dtype=jnp.float32, mtp=True)
    rng = random.Random(0)
    documents = [
        tokenizer.encode(f"The capital of {country.called} is {country.capital}.<|endoftext|>")
        for country in rng.sample(countries, 64)
    ]
    length = max(map(len, documents))
    tokens = np.zeros((64, length), np.int32)
    real = np.zeros((64, length), np.int32)
    for row, ids in enumerate(documents):
        tokens[row, : len(ids)], real[row, : len(ids)] = ids, 1

    @jax.jit
    def drafts(parameters):
        model = nnx.merge(graphdef, parameters)
        hidden, _ = model(tokens, segment_ids=real)
        return jnp.argmax(model.logits(model.draft_hidden(hidden, tokens, segment_ids=real)), axis=-1)

    guessed = np.asarray(drafts(parameters))[:, :-1]
    counted = real[:, 2:] == 1
    assert np.mean((guessed == tokens[:, 2:])[counted]) > 0.5


def test_its_head_drafts_most_of_what_it_says() -> None:
    """Past the end of answers too, and where it says nonsense."""
    model = load("nano", dtype="float32", parameter_dtype="float32", mtp=True)
    template = ChatTemplate.from_folder(FOLDER)
    prompts = [template.render([{"role": "user", "content": "What is the opposite of tall?"}]), *FREE_TEXT]
    settings = GenerationSettings(max_new_tokens=96, ignore_eos=True)
    answers = generate(model, prompts, settings, speculation=Speculation(4)).generations
    assert np.mean([answer.tokens_per_pass for answer in answers]) > 3.2


@pytest.mark.reference
def test_transformers_writes_the_same_greedy_text(
    answers: dict[str, Generation], tokenizer: Tokenizer
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    their_tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    their_model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "Who are you?"}]
    chat = their_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.from_folder(FOLDER).render(messages) == chat
    written = {prompt: answers[prompt] for prompt in FREE_TEXT}
    written |= {"The capital of France": answers["France"], chat: answers["Who are you?"]}
    for prompt, generation in written.items():
        ids = their_tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == tokenizer.encode(prompt)
        output = their_model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        text = their_tokenizer.decode(output, skip_special_tokens=True)
        assert text == generation.text, prompt


def test_the_generation_config_stops_at_both_end_tokens(tokenizer: Tokenizer) -> None:
    settings = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    ends = [tokenizer.encode(end) for end in ("<|im_end|>", "<|endoftext|>")]
    assert [[token] for token in settings["eos_token_id"]] == ends
