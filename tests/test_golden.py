"""The whole model in float64 against what the official implementation computed: tests/golden/, no PyTorch needed.

The files are described in scripts/make_golden.py, which wrote them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from einops import rearrange
from flax import nnx
from safetensors.numpy import save_file

from qwen35_jax.cache import DeltaNetCache, init_cache
from qwen35_jax.checkpoint import load_hf
from qwen35_jax.layer_groups import layer_locations
from qwen35_jax.model import abstract_model, decode_step, forward, prefill
from qwen35_jax.verify.nodes import layer_errors, layer_graphdef, outside_errors, pad_past
from tests.golden_records import GOLDEN, assert_close, golden

NODE_BOUND = 4.1e-14
CAPACITY = 40


@pytest.fixture(scope="module")
def model() -> Iterator[SimpleNamespace]:
    """The golden model in float64, MTP head included; 64-bit types are on while this file's tests run."""
    with jax.enable_x64(True):
        config, parameters, _ = load_hf(GOLDEN / "model", parameter_dtype=jnp.float64, mtp=True)
        graphdef, _ = abstract_model(config, parameter_dtype=jnp.float64, dtype=jnp.float64, mtp=True)
        yield SimpleNamespace(config=config.text, parameters=parameters, graphdef=graphdef)


# Padded to one length, all groups share one program; three-axis positions need another.
@jax.jit(static_argnums=0)
@chex.assert_max_traces(n=2)
def logits_of(graphdef, parameters, tokens, segment_ids, positions):
    return forward(
        graphdef, parameters, tokens, segment_ids=segment_ids, positions=positions, rematerialize="none"
    )


def padded(array: np.ndarray, length: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, length - array.shape[1])))


@pytest.mark.parametrize("group", ["text", "left_padding", "right_padding"])
def test_forward_equals_the_reference_on_every_real_token(model, group):
    case = golden("forward", group)
    mask = getattr(case, "attention_mask", np.ones_like(case.tokens))
    # All in the length of the longest group: the further padding is part of the test.
    tokens, segment_ids = padded(case.tokens, 70), padded(mask, 70).astype(np.int32)
    logits = logits_of(model.graphdef, model.parameters, tokens, segment_ids, None)
    real = segment_ids > 0
    assert_close(np.asarray(logits)[real], padded_logits(case.logits)[real])


def padded_logits(logits: np.ndarray) -> np.ndarray:
    return np.pad(logits, ((0, 0), (0, 70 - logits.shape[1]), (0, 0)))


def test_forward_with_three_axis_positions_equals_the_reference(model):
    case = golden("forward", "image_positions")
    assert len({row.tobytes() for row in case.position_ids}) == 3
    logits = logits_of(model.graphdef, model.parameters, case.tokens, None, case.position_ids)
    assert_close(logits, case.logits)


def extend(model, tokens, cache):
    """Prefill of any length up to 26, padded to 26 so that one program serves all."""
    segment_ids = padded(np.ones(tokens.shape, np.int32), 26)
    return prefill(model.graphdef, model.parameters, padded(tokens, 26), cache, segment_ids=segment_ids)


def new_cache(model):
    return init_cache(model.config, batch=2, capacity=CAPACITY, dtype=jnp.float64)


def assert_cache_equals(model, cache, group: str) -> None:
    case = golden("cache", group)
    for i, at in enumerate(layer_locations(model.config)):
        layer = jax.tree.map(lambda leaf, repeat=at.repeat: leaf[repeat], cache.groups[at.group][at.position])
        if isinstance(layer, DeltaNetCache):
            windows = [
                rearrange(np.asarray(window), "batch taps heads dim -> batch (heads dim) taps")
                for window in (layer.window_q, layer.window_k, layer.window_v)
            ]
            reference = getattr(case, f"layer{i}/conv")
            # A prompt shorter than the convolution: the reference stands for its missing inputs with zeros too.
            ours = np.concatenate(windows, axis=1)[: len(reference)]
            assert_close(ours, reference, where=f"layer {i} window")
            state = getattr(case, f"layer{i}/state")
            assert_close(layer.state[: len(state)], state, where=f"layer {i} state")
        else:
            for name in ("key", "value"):
                reference = rearrange(
                    getattr(case, f"layer{i}/{name}"), "batch head slot dim -> batch slot head dim"
                )
                batch, used = reference.shape[:2]
                ours = np.asarray(getattr(layer, name))
                assert_close(ours[:batch, :used], reference, where=f"layer {i} {name}")
                assert not ours[:, used:].any()


@pytest.mark.parametrize("pieces", [(26,), (1, 25), (2, 3, 21), (13, 13), (25, 1)], ids=str)
def test_b18_prefill_in_any_pieces_then_decoding_equals_the_reference(model, pieces):
    case, cache, start = golden("cache", "prefill"), new_cache(model), 0
    for size in pieces:
        logits, cache = extend(model, case.tokens[:, start : start + size], cache)
        start += size
    assert_close(logits, case.logits)
    assert_cache_equals(model, cache, "prefill")
    for step in range(3):
        case = golden("cache", f"step{step}")
        logits, cache = decode_step(model.graphdef, model.parameters, case.tokens[:, 0], cache)
        assert_close(logits, case.logits, where=f"step {step}")
    case = golden("cache", "chunk")
    logits, cache = extend(model, case.tokens, cache)
    assert_close(logits, case.logits, where="several tokens behind the decoded ones")
    assert_cache_equals(model, cache, "chunk")
    assert np.asarray(cache.lengths).tolist() == [34, 34]


def test_prompt_shorter_than_the_convolution_then_a_step_equals_the_reference(model):
    case = golden("cache", "short")
    logits, cache = extend(model, np.repeat(case.tokens, 2, axis=0), new_cache(model))
    assert_close(logits[:1], case.logits)
    assert_cache_equals(model, cache, "short")
    case = golden("cache", "short_step")
    logits, _ = decode_step(model.graphdef, model.parameters, np.repeat(case.tokens[:, 0], 2), cache)
    assert_close(logits[:1], case.logits)


def test_loss_and_the_gradient_of_every_weight_equal_the_reference(model, tmp_path):
    case = golden("gradients", "loss")

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(parameters):
        logits = forward(model.graphdef, parameters, case.tokens)[:, :-1]
        targets, labelled = case.labels[:, 1:], case.labels[:, 1:] >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(targets, 0))
        return jnp.where(labelled, each, 0).sum() / labelled.sum()

    loss, gradient = loss_and_gradient(model.parameters)
    assert_close(loss.reshape(1), case.loss)

    # A gradient has the layout of the weights: the reference's goes through the same loader.
    reference = vars(golden("gradients", "gradient"))
    shutil.copy(GOLDEN / "model" / "config.json", tmp_path)
    save_file(reference, tmp_path / "model.safetensors")
    _, reference, _ = load_hf(tmp_path, parameter_dtype=jnp.float64)
    head = gradient.pop("mtp")  # takes no part in this loss
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(head))
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, reference)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(reference), strict=True
    ):
        assert_close(ours, theirs, 1e-10, where=jax.tree_util.keystr(path))


def test_multi_token_prediction_equals_the_reference(model):
    case = golden("forward", "mtp")

    @jax.jit
    def draft(parameters):
        whole = nnx.merge(model.graphdef, parameters)
        hidden, _ = whole(case.tokens)
        drafted = whole.draft_hidden(hidden, case.tokens)
        return hidden, drafted, whole.logits(drafted)

    hidden, drafted, logits = draft(model.parameters)
    assert_close(hidden, case.main_hidden)
    assert_close(drafted, case.hidden)
    assert_close(logits, case.logits)


@pytest.mark.parametrize("layer", [0, 3])
def test_every_node_of_a_layer_equals_the_reference_on_its_inputs(model, layer):
    record = pad_past(vars(golden("nodes", f"layer{layer}")), CAPACITY)
    at = list(layer_locations(model.config))[layer]
    errors = layer_errors(
        layer_graphdef(model.config, model.config.layer_types[layer]),
        model.parameters["decoder"]["groups"][at.group]["layers"][at.position],
        at.repeat,
        record,
        np.array([5, 5], np.int32),
        dtype=jnp.dtype("float64"),
    )
    errors = {name: float(error) for name, error in errors.items()}
    assert len(errors) == (13 if layer == 0 else 14)
    assert {name: error for name, error in errors.items() if not error <= NODE_BOUND} == {}


def test_every_node_outside_the_layers_equals_the_reference_on_its_inputs(model):
    record = vars(golden("nodes", "outside"))
    attention = golden("nodes", "layer3")
    record |= {"cos": attention.cos, "sin": attention.sin}
    positions = np.broadcast_to(5 + np.arange(9), (2, 9))
    errors = outside_errors(model.graphdef, model.parameters, record, positions)
    errors = {name: float(error) for name, error in errors.items()}
    assert set(errors) == {"embed", "attn.rope", "final_norm", "lm_head"}
    assert {name: error for name, error in errors.items() if not error <= NODE_BOUND} == {}
