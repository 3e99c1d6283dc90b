"""Steps of the published models, compiled for slices of TPUs: they fit, and cost what they have to."""

from __future__ import annotations

import dataclasses

import pytest

from qwen35_jax.config import ModelConfig, published
from qwen35_jax.planning.compiling import CompiledPlan
from qwen35_jax.planning.inference_plan import inference_mesh, plan_inference
from qwen35_jax.planning.topologies import Topology, parse_topology
from qwen35_jax.planning.train_plan import TrainPlan, plan_training, training_mesh
from qwen35_jax.spec.closed_form import closed_form

ROW_LENGTH = 256


def with_layers(name: str, layers: int) -> ModelConfig:
    config = published(name)
    kinds = config.text.layer_types[:layers]
    return dataclasses.replace(
        config, text=dataclasses.replace(config.text, num_hidden_layers=layers, layer_types=kinds)
    )


def training(
    config: ModelConfig, topology: Topology, lora_rank: int | None
) -> tuple[TrainPlan, CompiledPlan]:
    plan = plan_training(
        config,
        topology,
        training_mesh(config, topology),
        row_length=ROW_LENGTH,
        lora_rank=lora_rank,
        optimizer="adamw",
    )
    assert isinstance(plan.compiled, CompiledPlan)
    return plan, plan.compiled


def check(config: ModelConfig, topology: Topology, lora_rank: int | None) -> None:
    """A step of one row for each device."""
    plan, compiled = training(config, topology, lora_rank)
    counts = closed_form(config, context=1, batch=1, dtype="bfloat16")
    weights, devices = counts.text_parameters, topology.devices
    if lora_rank is None:
        assert plan.weights_bytes <= 1.05 * 4 * weights / devices
        assert plan.optimizer_bytes <= 2.01 * plan.weights_bytes
    else:
        adapter = plan.optimizer_bytes / 2  # which AdamW has two moments of
        assert plan.weights_bytes - adapter <= 1.05 * 2 * weights / devices
        assert adapter <= 0.2 * plan.weights_bytes
    assert compiled.memory.peak <= topology.chip.hbm_bytes

    # Forward, again for the backward pass, and one or two products backward; the head is not run again.
    products = plan.rows * ROW_LENGTH / devices * 2 * counts.weight_multiplications
    passes = 4 if lora_rank is None else 3
    assert 0.75 * passes * products <= compiled.costs.flops <= 1.25 * passes * products

    # Weights come in bfloat16 for each pass over them, gradients go in float32, of the head for each block of tokens:
    # but no weight comes again for each block.
    gathered = 2 * weights
    assert compiled.costs.sent_bytes <= (8 if lora_rank is None else 3) * gathered
    assert compiled.costs.unknown_loops == 0


@pytest.mark.extended
def test_lora_of_the_4b_model_cut_to_four_layers_fits_a_slice_of_v5e():
    check(with_layers("Qwen/Qwen3.5-4B", 4), parse_topology("v5e:4x4"), 16)


@pytest.mark.extended
def test_full_training_of_the_27b_model_cut_to_four_layers_fits_a_slice_of_v5p():
    check(with_layers("Qwen/Qwen3.8-27B", 4), parse_topology("v5p:4x4x4"), None)


@pytest.mark.extended
def test_lora_of_the_whole_4b_model_fits_a_slice_of_v5e():
    check(published("Qwen/Qwen3.5-4B"), parse_topology("v5e:4x4"), 16)


@pytest.mark.extended
def test_a_decoding_step_reads_weights_and_cache_once_and_gathers_no_weights():
    config, topology = with_layers("Qwen/Qwen3.5-0.8B", 4), parse_topology("v5e:2x2")
    plan = plan_inference(config, topology, inference_mesh(config, topology), batch=3, context=1024)
    assert isinstance(plan.decode, CompiledPlan)
    counts = closed_form(config, context=1024, batch=3, dtype="bfloat16")
    assert plan.mesh == {"tensor": 4}
    assert plan.weights_bytes <= 1.05 * 2 * counts.text_parameters / 4
    # Two heads of keys and values are fewer than devices: each device holds both.
    assert counts.cache_bytes / 4 <= plan.cache_bytes <= counts.cache_bytes
    costs = plan.decode.costs
    assert costs.unknown_loops == 1
    assert plan.weights_bytes <= costs.hbm_bytes <= 1.5 * (plan.weights_bytes + 2 * plan.cache_bytes)
    assert costs.sent_bytes <= 0.02 * plan.weights_bytes
    products = 3 * 2 * counts.weight_multiplications / 4
    assert products <= costs.flops <= 1.2 * products
