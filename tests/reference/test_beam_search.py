"""Beam search beside that of transformers, on the built-in model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import qwen35_jax
from qwen35_jax.inference.beam_search import beam_search
from qwen35_jax.inference.tokenizer import Tokenizer

pytestmark = pytest.mark.reference

BEAMS, NEW = 3, 14


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_answers_and_scores_are_those_of_transformers(length_penalty: float) -> None:
    model = qwen35_jax.load("nano", dtype="float32")
    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_folder(model.folder)
    stop_ids = [*model.config.text.eos_token_id, tokenizer.encode("The end.")[-1]]
    for text in ("The capital of France", "A river is"):
        prompt = tokenizer.encode(text)
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([prompt]),
                num_beams=BEAMS,
                num_return_sequences=BEAMS,
                max_new_tokens=NEW,
                length_penalty=length_penalty,
                early_stopping="never",
                do_sample=False,
                eos_token_id=stop_ids,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        found = beam_search(
            model,
            prompt,
            beams=BEAMS,
            max_new_tokens=NEW,
            length_penalty=length_penalty,
            stop_ids=stop_ids,
        )
        assert len(found) == BEAMS
        for beam, sequence, score in zip(
            found, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
        ):
            answer = sequence[len(prompt) :]
            assert tuple(answer[: len(beam.tokens)]) == beam.tokens
            assert set(answer[len(beam.tokens) :]) <= {0, *stop_ids}  # padding
            assert beam.score == pytest.approx(score, abs=1e-4)
