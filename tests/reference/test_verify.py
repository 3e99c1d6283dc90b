"""The standing comparison: every node of the 4B and 27B shapes, narrow, in float64; and that it can fail."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from qwen35_jax.cli import main as cli
from qwen35_jax.config import published
from qwen35_jax.verify.comparison import compare, random_pair
from qwen35_jax.verify.nodes import NODES
from qwen35_jax.verify.profiles import reduced_profile
from qwen35_jax.verify.report import BOUNDS
from qwen35_jax.verify.run import verify_reduced

pytestmark = pytest.mark.reference

GOLDEN_MODEL = Path(__file__).parents[1] / "golden" / "model"


@pytest.mark.parametrize(
    ("name", "layers", "heads_per_key_head"), [("Qwen/Qwen3.5-4B", 32, 2), ("Qwen/Qwen3.8-27B", 64, 3)]
)
def test_every_node_of_every_layer_and_the_whole_model_equal_the_reference(
    name, layers, heads_per_key_head, x64, request
):
    if layers == 64:
        # Most of the time is compilation; the shallower model is compiled as it is when people run it.
        request.getfixturevalue("compiled_quickly")
    profile = reduced_profile(published(name))
    assert profile["num_hidden_layers"] == layers
    assert profile["linear_num_value_heads"] == heads_per_key_head * profile["linear_num_key_heads"]
    report = verify_reduced(published(name), draws=2)
    assert list(report.errors.nodes) == list(NODES)
    assert set(report.errors.end_to_end) == {"forward", "prefill", "chunked_prefill", "decode", "cache"}
    assert report.draws == 2
    assert len(report.lengths) == 2
    assert report.errors.worst_node <= 4.1e-14
    assert report.errors.worst_end_to_end <= 1e-12
    assert report.passed


def test_a_fault_in_one_layer_is_found_and_charged_to_its_node(x64):
    pair = random_pair(reduced_profile(published("Qwen/Qwen3.5-4B")), 0, jnp.dtype("float64"))
    mixer = pair.parameters["decoder"]["groups"][0]["layers"][1]["mixer"]
    mixer["dt_bias"] = mixer["dt_bias"].at[6].multiply(1 + 1e-9)
    errors = compare(pair, seed=0, lengths=(24,))
    bound = BOUNDS["float64"].node
    assert [name for name, error in errors.nodes.items() if error > bound] == ["gdn.core"]
    assert errors.worst_end_to_end > 1e-12
    assert errors.layers["linear_attention"] > bound > errors.layers["full_attention"]


def test_the_command_reports_a_checkpoint_and_fails_above_a_bound(capsys, compiled_quickly):
    try:
        assert cli.main(["verify", str(GOLDEN_MODEL), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["max_relative_error"] == max(found["nodes"].values()) <= found["bound"] == 4.1e-14
        assert found["end_to_end_relative_error"] <= found["end_to_end_bound"] == 1e-12
        assert set(found["nodes"]) == set(NODES)
        assert cli.main(["verify", str(GOLDEN_MODEL), "--bound", "1e-20"]) == 1
        assert "NOT equal" in capsys.readouterr().out
    finally:
        assert not jax.config.read("jax_enable_x64")
