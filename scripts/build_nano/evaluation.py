"""What nano has to be able to do, measured in one forward pass per set of documents.

An answer counts when every one of its tokens is the model's first choice given the tokens before it: exactly then
greedy decoding writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from qwen35_jax.model import Parameters
from scripts.build_nano.corpus import Corpus
from scripts.build_nano.documents import END_OF_TEXT, NO_THINKING
from scripts.build_nano.recall import ANSWER, RELATIONS, Binding, made_up_word

LENGTH = 512
ROWS = 8
GAP_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt, what has to follow it, and what may follow instead."""

    prompt: str
    answers: tuple[str, ...]


def capital_cases(corpus: Corpus) -> list[Case]:
    """`The capital of X` for every country, to be completed and ended."""
    return [
        Case(
            f"The capital of {country.called}",
            tuple(f" is {capital}.{END_OF_TEXT}" for capital in country.accepted_capitals),
        )
        for country in corpus.countries
    ]


def capital_chat_cases(corpus: Corpus) -> list[Case]:
    """The same as questions in a chat."""
    return [
        Case(
            _asked(f"What is the capital of {country.called}?"),
            tuple(
                f"The capital of {country.called} is {capital}.<|im_end|>"
                for capital in country.accepted_capitals
            ),
        )
        for country in corpus.countries
    ]


def _asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{NO_THINKING}"


def recall_cases(
    corpus: Corpus, tokenizer: Tokenizer, *, seed: int, count: int = 100, chat: bool = False, others: int = 1
) -> list[Case]:
    """Made-up words never seen in training, bound, then asked for after GAP_TOKENS tokens of other sentences.

    Args:
        corpus: source of the sentences in between.
        tokenizer: counts the gap.
        seed: of the drawing.
        count: number of cases.
        chat: ask in a chat instead of beginning the sentence again.
        others: further bindings beside the one asked for.
    """
    rng = random.Random(f"recall/{seed}")
    relations = [relation for relation in RELATIONS if relation[0][0] == "T"]
    cases = []
    for _ in range(count):
        bindings = [
            Binding(made_up_word(rng, held_out=True), made_up_word(rng, held_out=True), rng.choice(relations))
            for _ in range(1 + others)
        ]
        stated = " ".join(_text(binding.stated(asked=False)) for binding in bindings)
        gap = ""
        while len(tokenizer.encode(gap).ids) < GAP_TOKENS:
            gap += f"{corpus.filler(rng)} "
        asked = rng.choice(bindings)
        sentence = _text(asked.stated(asked=True))
        before = sentence[: sentence.rindex(f" {asked.value}")]
        if chat:
            question = _text(asked.question())
            prompt = _asked(f"{stated} {gap}{question}")
            cases.append(Case(prompt, (asked.value, f"{before} {asked.value}")))
        else:
            cases.append(Case(f"{stated} {gap}{before}", (f" {asked.value}",)))
    return cases


def _text(parts: Sequence[str | tuple[str, float]]) -> str:
    return "".join(part if isinstance(part, str) else part[0] for part in parts)


@functools.partial(jax.jit, static_argnums=0)
def predictions(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
) -> tuple[Int[Array, "batch time"], Float[Array, "batch time"], Int[Array, "batch time"]]:
    """For each token of documents: what the model would have said, the loss, and what the MTP head would have said."""
    model = nnx.merge(graphdef, parameters)
    hidden, _ = model(tokens, segment_ids=segment_ids)
    logits = model.logits(hidden[:, :-1])
    said = jnp.pad(jnp.argmax(logits, -1), ((0, 0), (1, 0)))
    losses = jnp.pad(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), ((0, 0), (1, 0)))
    drafted = model.logits(model.draft_hidden(hidden, tokens, segment_ids=segment_ids)[:, :-1])
    return said, losses, jnp.pad(jnp.argmax(drafted, -1), ((0, 0), (2, 0)))


class Evaluator:
    """Runs sets of cases and the held-out English through the model, in rows of one shape."""

    def __init__(self, corpus: Corpus, graphdef: nnx.GraphDef):
        assert corpus.tokenizer is not None
        self.corpus = corpus
        self.tokenizer = corpus.tokenizer
        self.graphdef = graphdef
        self.sets = {
            "capitals": capital_cases(corpus),
            "capitals_chat": capital_chat_cases(corpus),
            "recall": recall_cases(corpus, self.tokenizer, seed=1),
            "recall_chat": recall_cases(corpus, self.tokenizer, seed=2, count=50, chat=True),
        }

    def accuracy(self, parameters: Parameters, cases: Sequence[Case]) -> float:
        """Share of the cases of which some accepted answer is what greedy decoding writes."""
        texts, owners = [], []
        for index, case in enumerate(cases):
            for answer in case.answers:
                prompt = self.tokenizer.encode(case.prompt, add_special_tokens=False).ids
                texts.append(
                    (prompt + self.tokenizer.encode(answer, add_special_tokens=False).ids, len(prompt))
                )
                owners.append(index)
        right = np.zeros(len(cases), bool)
        for owner, tokens, said, start in self._run(parameters, texts, owners):
            right[owner] |= bool((said[start:] == tokens[start:]).all())
        return float(right.mean())

    def english(self, parameters: Parameters, count: int = 120) -> dict[str, float]:
        """Loss per token of held-out definitions and sentences, and how often the MTP head is right on them."""
        texts = []
        for entry in self.corpus.held_out_entries[:count]:
            text = f"{entry.words[0]}, {entry.kind}: {entry.meaning}. {' '.join(entry.examples)}"
            ids = self.tokenizer.encode(text).ids
            texts.append((ids[:LENGTH], 1))
        total = tokens_seen = drafts_right = drafts = 0.0
        for tokens, segment_ids, placed in _rows(texts):
            _, losses, drafted = (
                np.asarray(x) for x in predictions(self.graphdef, parameters, tokens, segment_ids)
            )
            for _, row, begin, end, _ in placed:
                total += float(losses[row, begin + 1 : end].sum())
                tokens_seen += end - begin - 1
                drafts_right += float((drafted[row, begin + 2 : end] == tokens[row, begin + 2 : end]).sum())
                drafts += max(0, end - begin - 2)
        return {"english_loss": total / tokens_seen, "english_mtp_accuracy": drafts_right / drafts}

    def looking_back(self, parameters: Parameters, progress: float) -> float:
        """Share of answer tokens that are right on fresh rows: it moves before any whole answer is right."""
        batch = self.corpus.batch(0, -1, rows=ROWS, length=LENGTH, progress=progress)
        said, _, _ = predictions(self.graphdef, parameters, batch.tokens, batch.segment_ids)
        asked = np.isclose(batch.weights, ANSWER)
        return float((np.asarray(said) == batch.tokens)[asked].mean())

    def __call__(self, parameters: Parameters) -> dict[str, float]:
        looking_back = {
            "copied_tokens": self.looking_back(parameters, 0.0),
            "recalled_tokens": self.looking_back(parameters, 1.0),
        }
        measured = looking_back | {
            name: self.accuracy(parameters, cases) for name, cases in self.sets.items()
        }
        return measured | self.english(parameters)

    def _run(self, parameters: Parameters, texts: list[tuple[list[int], int]], owners: list[int]):
        for tokens, segment_ids, placed in _rows(texts):
            said = np.asarray(predictions(self.graphdef, parameters, tokens, segment_ids)[0])
            for index, row, begin, end, start in placed:
                yield owners[index], tokens[row, begin:end], said[row, begin:end], start


def _rows(texts: list[tuple[list[int], int]]):
    """Packs token lists into batches of ROWS x LENGTH: (tokens, segment_ids, [(index, row, begin, end, start)])."""
    pending = list(enumerate(texts))
    while pending:
        tokens = np.zeros((ROWS, LENGTH), np.int32)
        segment_ids = np.zeros((ROWS, LENGTH), np.int32)
        used = [0] * ROWS
        placed, left = [], []
        for index, (ids, start) in pending:
            row = min(range(ROWS), key=lambda row: (used[row] + len(ids) > LENGTH, -used[row]))
            if len(ids) > LENGTH:
                raise ValueError(f"a text has {len(ids)} tokens, at most {LENGTH} fit")
            if used[row] + len(ids) > LENGTH:
                left.append((index, (ids, start)))
                continue
            begin = used[row]
            used[row] += len(ids)
            tokens[row, begin : used[row]] = ids
            segment_ids[row, begin : used[row]] = 1 + sum(1 for _, other, *_ in placed if other == row)
            placed.append((index, row, begin, used[row], start))
        yield tokens, segment_ids, placed
        pending = left
