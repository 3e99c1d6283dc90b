"""The work of a step, counted by hand for a model whose counts are known."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from qwen35_jax.config import ModelConfig, published
from qwen35_jax.training.flops import step_work, token_counts

CONFIG = published("Qwen/Qwen3.5-0.8B")
WEIGHTS, TABLES, PER_EARLIER = 752_016_384, 18_874_368, 24_576


def step_flops(config: ModelConfig, tokens: float, pairs: float, *, adapter: bool, mtp: bool) -> float:
    return step_work(config, adapter=adapter, mtp=mtp).flops(tokens, pairs)


def test_tokens_and_pairs_are_counted_document_by_document_and_padding_is_not() -> None:
    segment_ids = jnp.array([[[1, 1, 1, 2, 2, 0, 0], [0, 3, 3, 3, 3, 3, 3]]])
    tokens, pairs = token_counts(segment_ids)
    assert (tokens, pairs) == (5 + 6, (0 + 1 + 2) + (0 + 1) + (0 + 1 + 2 + 3 + 4 + 5))


def test_a_step_is_three_passes_over_all_products_and_with_an_adapter_two() -> None:
    one_token = step_flops(CONFIG, 1, 0, adapter=False, mtp=False)
    assert one_token == pytest.approx(2 * 3 * (WEIGHTS + TABLES), rel=1e-3)
    assert step_flops(CONFIG, 1, 0, adapter=True, mtp=False) == pytest.approx(one_token * 2 / 3)
    assert step_flops(CONFIG, 0, 1, adapter=False, mtp=False) == 2 * 3 * PER_EARLIER
    assert step_flops(CONFIG, 10, 45, adapter=False, mtp=False) == 10 * one_token + 45 * 6 * PER_EARLIER


def test_the_draft_head_counts_its_layer_and_the_output_head_again() -> None:
    without, with_head = (step_flops(CONFIG, 1, 0, adapter=False, mtp=mtp) for mtp in (False, True))
    head = CONFIG.text.vocab_size * CONFIG.text.hidden_size
    assert 6 * head < with_head - without < 6 * head + 6 * 50e6
    assert step_flops(CONFIG, 0, 1, adapter=False, mtp=True) == 6 * (PER_EARLIER + PER_EARLIER // 6)
