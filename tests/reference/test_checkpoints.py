"""Checkpoints written by transformers: loaded, run, and written back."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qwen35_jax.checkpoint import LoadedModel, export_hf, load_hf
from qwen35_jax.config import ModelConfig
from qwen35_jax.inference import GenerationSettings, generate
from qwen35_jax.model import abstract_model, forward, init_model
from tests.reference.tiny_reference import VOCAB, float32_model, text_config, vision_language_config

pytestmark = pytest.mark.reference

NEW_TOKENS = 64
PROMPTS = [[5, 17, 3, 44, 8], [61, 2, 9, 9, 30, 71, 12, 1, 0, 55, 6]]
CHECKPOINTS = {
    "text, tied, sharded": (text_config(tie_word_embeddings=True), "30KB"),
    "text, untied, one file": (text_config(tie_word_embeddings=False), "1GB"),
    "vision-language, tied, one file": (vision_language_config(tied=True), "1GB"),
    "vision-language, untied, sharded": (vision_language_config(tied=False), "30KB"),
}


@pytest.fixture(params=CHECKPOINTS)
def saved(request, tmp_path):
    """A random model of transformers, and the folder it saved itself to."""
    config, shard_size = CHECKPOINTS[request.param]
    model = float32_model(config, seed=7)
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size=shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size == "30KB")
    return model, folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "generation_config.json"
    }


def test_same_greedy_tokens_for_64_steps_and_exported_byte_for_byte(saved, tmp_path):
    model, folder = saved
    config, parameters, kept = load_hf(folder)
    graphdef, _ = abstract_model(config, parameter_dtype=jnp.float32, dtype=jnp.float32)
    ours = generate(
        LoadedModel(config, graphdef, parameters, folder),
        PROMPTS,
        GenerationSettings(max_new_tokens=NEW_TOKENS),
        stop_ids=(),
    )
    for prompt, answer in zip(PROMPTS, ours.generations, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        assert list(answer.tokens) == theirs[0, len(prompt) :].tolist()
        assert len(set(answer.tokens)) > 8  # no fixed point that any model would repeat

    export_hf(parameters, config, tmp_path / "exported", kept=kept)
    assert bytes_of(tmp_path / "exported") == bytes_of(folder)


def test_transformers_loads_what_is_written_here(tmp_path):
    config = ModelConfig.from_hf({"model_type": "qwen3_5_text", **text_config(tie_word_embeddings=True)})
    graphdef, parameters = init_model(config, seed=3, parameter_dtype=jnp.float32, dtype=jnp.float32)
    parameters = jax.tree.map(lambda leaf: leaf * 1.25, parameters)
    export_hf(parameters, config, tmp_path / "exported")
    theirs, problems = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.float32, output_loading_info=True
    )
    assert not any(problems.values())
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 13))
    ours = jax.jit(functools.partial(forward, rematerialize="none"), static_argnums=0)(
        graphdef, parameters, tokens
    )
    with torch.no_grad():
        expected = theirs(input_ids=torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())
