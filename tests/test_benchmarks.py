"""What the benchmarks measure against: the least work in closed form, and programs timed in turn."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import qwen35_jax
from qwen35_jax.config import published, published_names
from qwen35_jax.spec import specify
from scripts import bench_timing
from scripts.bench_timing import calls_in_turn, time_in_turn
from scripts.least_work import decode_bytes, layer_weights, prefill_flops

DENSE = [name for name in published_names() if published(name).text.moe is None]


@pytest.mark.parametrize("name", DENSE)
def test_every_weight_of_the_text_model_is_counted_once(name: str) -> None:
    config = published(name)
    tables = 1 if config.tie_word_embeddings else 2
    table = config.text.vocab_size * config.text.hidden_size
    assert layer_weights(config) + tables * table == specify(config).text_parameters
    assert decode_bytes(config, 2) == 2 * (layer_weights(config) + table + config.text.hidden_size)


def test_work_of_a_prefill_grows_with_the_tokens_and_attention_with_their_square() -> None:
    config = published("Qwen/Qwen3.5-0.8B")
    one, two, three = (prefill_flops(config, tokens) for tokens in (1, 2, 3))
    per_pair = 4 * config.text.num_attention_heads * config.text.head_dim
    assert (three - two) - (two - one) == per_pair * config.text.layer_types.count("full_attention")
    assert 2 * layer_weights(config) < two - one < 2.1 * layer_weights(config)


def test_each_run_comes_after_a_call_of_the_same_program_that_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(bench_timing, "REST_SECONDS", 0.0)
    calls: list[str] = []
    programs = {name: lambda name=name: calls.append(name) for name in "ab"}
    timings = time_in_turn(programs, rounds=2, calls_per_run=3)
    assert "".join(calls) == "ab" + 2 * "aaaabbbb"
    assert calls.count("a") == calls_in_turn(rounds=2, calls_per_run=3)
    assert [len(timing.runs) for timing in timings.values()] == [2, 2]


@pytest.fixture
def bench_train(monkeypatch):
    """The script, which finds its neighbours as when it is run."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    return importlib.import_module("bench_train")


def test_work_of_a_training_step_is_three_times_that_of_its_products_and_all_logits(bench_train) -> None:
    config = bench_train.shallow(published("Qwen/Qwen3.5-0.8B"), 4)
    assert layer_weights(config) < layer_weights(published("Qwen/Qwen3.5-0.8B")) / 5.5
    logits = 2 * config.text.vocab_size * config.text.hidden_size
    per_token = bench_train.training_flops(config, 3) - bench_train.training_flops(config, 2)
    assert 3 * (2 * layer_weights(config) + logits) < per_token < 3.1 * (2 * layer_weights(config) + logits)
    assert bench_train.training_flops(config, 2) == 3 * prefill_flops(config, 2)


def test_growth_of_memory_is_one_where_each_token_costs_the_same(bench_train) -> None:
    assert bench_train.growth({"2": 1020, "4": 1040, "8": 1080}) == 1
    assert bench_train.growth({"2": 1004, "4": 1016, "8": 1064}) == 2


def test_a_side_of_the_training_benchmark_answers_in_a_process_of_its_own(bench_train) -> None:
    nano = Path(qwen35_jax.__file__).parent / "nano"
    with bench_train.started("ours", nano, 8) as side:
        first, again = side.ask("step"), side.ask("step")
        assert first["loss"] == again["loss"] > 0
        assert again["seconds"] > 0
        assert min(side.ask("products", [[8, 16, 4]])["gflops"]) > 0
        assert side.ask("memory")["peak_bytes"] > 1 << 20
