"""The configuration classes of `transformers` read the same from a file, also from one that is written here."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from qwen35_jax.config import ModelConfig, published, published_names
from tests.config_files import flat, moe_section, nested, text_section

pytestmark = pytest.mark.reference

OLD_ROTARY = {
    "rope_parameters": None,
    "rope_theta": 5e6,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "mrope_section": [6, 5, 5]},
    "max_position_embeddings": 4000,
}
FILES = {
    "text": flat(text_section(eos_token_id=[1, 2]), tie_word_embeddings=True),
    "vision-language": nested(text_section(tie_word_embeddings=True), dtype="bfloat16"),
    "sparse text": flat(moe_section()),
    "sparse vision-language": nested(moe_section()),
    "old rotary spelling": flat(text_section(**OLD_ROTARY)),
    "old rotary spelling, nested": nested(text_section(**OLD_ROTARY)),
    "no rotary fields": flat(text_section(rope_parameters=None)),
    "interval": flat(text_section(full_attention_interval=2)),
}


def through_transformers(data):
    """What the reference's class for this `model_type` writes after reading `data`."""
    import transformers

    names = {"qwen3_5": "Qwen3_5Config", "qwen3_5_text": "Qwen3_5TextConfig"}
    names |= {"qwen3_5_moe": "Qwen3_5MoeConfig", "qwen3_5_moe_text": "Qwen3_5MoeTextConfig"}
    return getattr(transformers, names[data["model_type"]]).from_dict(copy.deepcopy(data)).to_dict()


@pytest.mark.parametrize("name", FILES)
def test_both_read_the_same_from_a_file(name):
    ours = ModelConfig.from_hf(FILES[name])
    theirs = ModelConfig.from_hf(through_transformers(FILES[name]))
    assert theirs == ours
    assert theirs.to_hf() == through_transformers(FILES[name])


@pytest.mark.parametrize("name", published_names())
def test_a_file_written_from_nothing_means_the_same_to_both(name):
    config = dataclasses.replace(published(name), source=None)
    assert ModelConfig.from_hf(through_transformers(config.to_hf())) == config
