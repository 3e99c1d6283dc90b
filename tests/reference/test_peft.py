"""PEFT loads the adapters that are written here, and those that it writes are read here."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from qwen35_jax.model import forward
from qwen35_jax.training.lora import LINEAR_MAPS, LoRA, init_adapter, with_adapter
from qwen35_jax.training.peft import read_peft, write_peft
from qwen35_jax.verify.comparison import Pair, random_pair
from qwen35_jax.verify.reference import float64_arithmetic
from tests.reference.tiny_reference import VOCAB, text_config, vision_language_config
from tests.small_text_model import difference

pytestmark = [pytest.mark.reference, pytest.mark.usefixtures("x64", "compiled_quickly")]

TOKENS = np.random.default_rng(0).integers(0, min(VOCAB, 80), (2, 13))
CONFIGS = {
    "Qwen3_5ForCausalLM": text_config(tie_word_embeddings=True),
    "Qwen3_5ForConditionalGeneration": vision_language_config(tied=False),
}


@pytest.fixture
def pair(request) -> Pair:
    """New for each test: PEFT puts its layers into the reference."""
    return random_pair(CONFIGS[request.param], 3, jnp.dtype("float64"))


@functools.partial(jax.jit, static_argnums=(0, 3))
def logits(graphdef, parameters, adapter, settings):
    return forward(graphdef, with_adapter(parameters, adapter, settings, None), jnp.asarray(TOKENS))


def expected(model: Any) -> np.ndarray:
    with float64_arithmetic(), torch.no_grad():
        return model(input_ids=torch.as_tensor(TOKENS), use_cache=False).logits.numpy()


def drawn(path: Any, array: jax.Array) -> jax.Array:
    rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
    return jnp.asarray(0.3 * rng.standard_normal(array.shape))


@pytest.mark.parametrize("pair", CONFIGS, indirect=True)
@pytest.mark.parametrize("targets", ["all-linear", ("in_proj_qkv", "q_proj")])
def test_b81_peft_loads_a_written_adapter_and_gives_the_same_logits(tmp_path, pair, targets):
    settings = LoRA(rank=3, alpha=5.0, targets=targets)
    adapter = init_adapter(pair.config, settings, key=jax.random.key(0), dtype="float64")
    adapter = jax.tree_util.tree_map_with_path(drawn, adapter)
    write_peft(tmp_path / "adapter", adapter, settings, pair.config)
    before = expected(pair.reference)
    model = peft.PeftModel.from_pretrained(pair.reference, tmp_path / "adapter")
    theirs = expected(model.eval())
    assert difference(logits(pair.graphdef, pair.parameters, adapter, settings), theirs) <= 1e-10
    assert difference(before, theirs) > 1e-2


@pytest.mark.parametrize("pair", ["Qwen3_5ForCausalLM"], indirect=True)
def test_b79_what_peft_writes_of_all_linear_is_read_and_gives_the_same_logits(tmp_path: Path, pair):
    chosen = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(pair.reference, chosen).eval()
    model.save_pretrained(tmp_path)
    adapter, settings = read_peft(tmp_path, pair.config)
    assert settings == LoRA(rank=3, alpha=5.0, targets=LINEAR_MAPS)
    assert difference(logits(pair.graphdef, pair.parameters, adapter, settings), expected(model)) <= 1e-10
