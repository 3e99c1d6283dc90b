"""Teaches the built-in model 200 invented facts by LoRA, and counts what it knows before and after.

    python -m scripts.finetune_facts OUTPUT [--facts 200] [--steps N] [--rate R] [--transformers] [--json]

A fact is the mayor of an invented town, asked for in a chat. What the model knew before is the capitals of the
countries of its own training, as chats and as sentences to be continued: those that it has right before are asked again
after. Beside the facts it rehearses 400 documents about countries, drawn as those of its own training were. OUTPUT
holds the config of the run and what `qwen35 train` makes of it. With `--transformers` the trained model answers all
questions once more there, greedily and in float32, and the answers are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen35_jax.checkpoint import load
from qwen35_jax.cli.training_progress import training_progress
from qwen35_jax.inference import GenerationSettings, generate
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.training.settings import read_settings
from qwen35_jax.training.trainer import Trainer
from scripts.bench_timing import machine, machine_line
from scripts.build_nano.countries import country_document, read_countries
from scripts.build_nano.recall import made_up_word

ANSWER_TOKENS = 40
REHEARSED = 400

CONFIG = """\
[model]
source = "nano"
dtype = "float32"

[data]
train = "{train}"
row_length = 256
rows_per_step = 4

[lora]
rank = 32
alpha = 32

[optimizer]
learning_rate = {rate}
warmup_steps = 20
weight_decay = 0.0

[run]
output = "{output}"
steps = {steps}
evaluate_every = 100
save_every = 200
questions = ["{question}", "What is the capital of Japan?"]
answer_tokens = 40
"""

Question = tuple[str, str]
"""What the model reads, all of it, and what it has to say then."""


def invented_facts(count: int) -> list[tuple[str, str]]:
    """Questions and answers about towns that are nowhere."""
    rng = random.Random("mayors")
    towns: dict[str, str] = {}
    while len(towns) < count:
        town, *names = (made_up_word(rng, held_out=False).capitalize() for _ in range(3))
        towns.setdefault(town, " ".join(names))
    return [
        (f"Who is the mayor of {town}?", f"The mayor of {town} is {mayor}.") for town, mayor in towns.items()
    ]


def chat(question: str, answer: str) -> dict[str, Any]:
    """A line of training data."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def rehearsed(count: int) -> list[dict[str, Any]]:
    """Lines of training data: documents as those of the model's own training."""
    rng, countries = random.Random("rehearsed"), read_countries()
    return [{"parts": country_document(rng, countries).parts} for _ in range(count)]


def capitals(template: ChatTemplate) -> list[Question]:
    """The capital of every country, asked for in a chat and left out at the end of a sentence."""
    questions = []
    for country in read_countries():
        asked = [{"role": "user", "content": f"What is the capital of {country.called}?"}]
        questions += [
            (template.render(asked), f"The capital of {country.called} is {country.capital}."),
            (f"The capital of {country.called}", f" is {country.capital}."),
        ]
    return questions


def answers(source: str | Path, questions: Sequence[Question]) -> list[str]:
    """What a model says to each, greedily and in float32."""
    model = load(source, dtype="float32", parameter_dtype="float32")
    settings = GenerationSettings(max_new_tokens=ANSWER_TOKENS)
    result = generate(model, [prompt for prompt, _ in questions], settings)
    return [generation.text or "" for generation in result.generations]


def answers_of_transformers(folder: Path, questions: Sequence[Question]) -> list[str]:
    """The same from the Hugging Face implementation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = []
    for prompt, _ in questions:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            out = model.generate(
                **ids, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        said.append(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))
    return said


def right(said: Sequence[str], questions: Sequence[Question]) -> list[bool]:
    return [answer == expected for answer, (_, expected) in zip(said, questions, strict=True)]


def measure(output: Path, *, facts: int, steps: int, rate: float, transformers: bool) -> dict[str, Any]:
    """Trains and counts."""
    output.mkdir(parents=True, exist_ok=True)
    pairs = invented_facts(facts)
    train = output / "facts.jsonl"
    with train.open("w", encoding="utf-8") as file:
        for line in [*(chat(*pair) for pair in pairs), *rehearsed(REHEARSED)]:
            file.write(json.dumps(line) + "\n")
    config = output / "run.toml"
    text = CONFIG.format(train=train, output=output / "run", steps=steps, rate=rate, question=pairs[0][0])
    config.write_text(text, encoding="utf-8")

    template = ChatTemplate.from_folder(Path(load("nano").folder))
    new = [(template.render([{"role": "user", "content": question}]), answer) for question, answer in pairs]
    new_before = sum(right(answers("nano", new), new))
    old = capitals(template)
    known = [question for question, held in zip(old, right(answers("nano", old), old), strict=True) if held]
    begun = time.perf_counter()
    with training_progress() as watcher:
        outcome = Trainer(read_settings(config), watcher=watcher).run()
    seconds = time.perf_counter() - begun
    assert outcome.model is not None, "the run was stopped"
    asked = [*new, *known]
    said = answers(outcome.model, asked)
    held = right(said, asked)
    found: dict[str, Any] = {
        "training_seconds": seconds,
        "facts": len(new),
        "facts_known_before": new_before,
        "facts_known": sum(held[: len(new)]),
        "capitals_known_before": len(known),
        "capitals_known": sum(held[len(new) :]),
    }
    if transformers:
        gc.collect()
        there = answers_of_transformers(outcome.model, asked)
        found["same_answers_in_transformers"] = sum(
            ours == theirs for ours, theirs in zip(said, there, strict=True)
        )
        found["questions"] = len(asked)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--facts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate at its highest")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(
        args.output, facts=args.facts, steps=args.steps, rate=args.rate, transformers=args.transformers
    )
    if args.json:
        print(json.dumps({"machine": machine(), **found}))
        return
    print(machine_line(machine()))
    print(
        f"new facts: {found['facts_known_before']} of {found['facts']} before, {found['facts_known']} after"
    )
    share = found["capitals_known"] / found["capitals_known_before"]
    print(
        f"capitals: {found['capitals_known']} of the {found['capitals_known_before']} known before ({share:.1%})"
    )
    print(f"training: {found['training_seconds']:.0f} s")
    if args.transformers:
        print(
            f"transformers: {found['same_answers_in_transformers']} of {found['questions']} answers the same"
        )


if __name__ == "__main__":
    main()
