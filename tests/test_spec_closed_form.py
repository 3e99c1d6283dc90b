"""The closed forms of the published models, and a cache that takes what they say."""

from __future__ import annotations

import math

import jax
import pytest

from qwen35_jax.cache import init_cache
from qwen35_jax.config import published, published_names
from qwen35_jax.spec.closed_form import ClosedForm, closed_form


def counts(name: str, *, context: int = 1, batch: int = 1, dtype: str = "bfloat16") -> ClosedForm:
    return closed_form(published(name), context=context, batch=batch, dtype=dtype)


def test_counts_of_the_0_8b_model():
    told = counts("Qwen/Qwen3.5-0.8B").to_json()
    assert told["numbers_per_token"] == 6_144
    assert told["table_numbers"] == 288 * 16_384
    assert told["fixed_numbers"] == 5_050_368
    assert told["multiplications"] == {
        "weights": 752_393_024,
        "tables": 18_874_368,
        "per_earlier_token": 24_576,
    }
    parts = told["parameters"]["by_part"]
    assert round(parts["gated_delta_net"] / 1e6, 1) == 189.8
    assert round(parts["attention"] / 1e6, 1) == 44.0
    assert told["layers"] == {"linear_attention": 18, "full_attention": 6}


def test_counts_of_the_27b_model():
    told = counts("Qwen/Qwen3.8-27B").to_json()
    assert told["numbers_per_token"] == 32_768
    assert told["layers"] == {"linear_attention": 48, "full_attention": 16}
    assert told["table_numbers"] == 37_748_736 == 48 * 786_432
    assert told["crossing_tokens"] == 384
    # Its table of token vectors is looked up, and a head of its own is multiplied.
    assert told["multiplications"]["weights"] == told["parameters"]["text"] - 248_320 * 5_120


def test_counts_of_the_4b_model():
    told = counts("Qwen/Qwen3.5-4B").to_json()
    assert told["layers"] == {"linear_attention": 24, "full_attention": 8}
    assert told["tables_per_layer"] == 32
    assert told["table_numbers"] == 24 * 32 * 128 * 128


def test_a_token_of_a_mixture_meets_its_own_experts_only():
    told = counts("Qwen/Qwen3.5-35B-A3B")
    assert told.active_parameters == 3_454_988_928
    assert told.weight_multiplications == told.active_parameters - 248_320 * 2_048


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.8-27B"])
def test_the_cache_is_as_large_as_that_of_the_model(name, dtype):
    cache = jax.eval_shape(lambda: init_cache(published(name).text, batch=3, capacity=1_000, dtype=dtype))
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.groups))
    assert counts(name, context=1_000, batch=3, dtype=dtype).cache_bytes == nbytes


@pytest.mark.parametrize("name", published_names())
def test_from_the_crossing_on_a_table_is_no_larger_than_keys_and_values(name):
    told, text = counts(name), published(name).text
    table = told.table_numbers // told.layers["linear_attention"]
    per_token = told.numbers_per_token // told.layers["full_attention"]
    assert told.crossing_tokens is not None
    assert (told.crossing_tokens - 1) * per_token < table <= told.crossing_tokens * per_token
    assert told.pure_attention_cache_bytes == 2 * per_token * text.num_hidden_layers
