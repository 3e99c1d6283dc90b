"""Loss and gradients of preference optimization against `transformers` and torch's autograd, in float64."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.model import Parameters
from qwen35_jax.training.batches import single_pass
from qwen35_jax.training.document import Document
from qwen35_jax.training.preference.dataset import Pair
from qwen35_jax.training.preference.objective import Preference, PreferenceMeasures
from qwen35_jax.training.preference.rows import ReferencedRows, pack_pairs
from qwen35_jax.verify.comparison import random_pair
from qwen35_jax.verify.reference import float64_arithmetic
from tests.reference.tiny_reference import VOCAB, text_config
from tests.small_text_model import difference

pytestmark = pytest.mark.reference

# Of prompt, chosen and rejected answer: shorter than the convolution, and longer than a chunk of the delta rule.
LENGTHS = ((2, 3, 1), (66, 5, 9), (1, 2, 2))
PREFERENCE = Preference(beta=0.2, label_smoothing=0.1, chosen_weight=0.5)
REFERENCE = -np.random.default_rng(6).uniform(4, 40, (len(LENGTHS), 2))

pair_of_models = functools.cache(
    lambda: random_pair(text_config(tie_word_embeddings=True), 5, jnp.dtype("float64"))
)


def pairs() -> list[Pair]:
    rng = np.random.default_rng(4)
    found = []
    for known, *lengths in LENGTHS:
        prompt = rng.integers(0, VOCAB, known)
        answers = [np.concatenate([prompt, rng.integers(0, VOCAB, length)]) for length in lengths]
        found.append(
            Pair(*(Document(tokens.astype(np.int32), np.arange(len(tokens)) >= known) for tokens in answers))
        )
    return found


@functools.cache
def expected() -> tuple[PreferenceMeasures, Parameters]:
    """The reference's measures, each document by itself, and its gradients read as a checkpoint."""
    model = pair_of_models().reference

    def log_probability(document: Document) -> torch.Tensor:
        tokens = torch.as_tensor(document.tokens, dtype=torch.int64)
        found = functional.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0, :-1], dim=-1)
        return found.gather(1, tokens[1:, None])[torch.as_tensor(document.trained[1:])].sum()

    with float64_arithmetic():
        model.zero_grad()
        known = torch.stack([torch.stack([*map(log_probability, pair)]) for pair in pairs()])
        rewards = PREFERENCE.beta * (known - torch.as_tensor(REFERENCE))
        margin = rewards[:, 0] - rewards[:, 1]
        counts = torch.as_tensor([pair.chosen.trained.sum() for pair in pairs()])
        smoothing = PREFERENCE.label_smoothing
        losses = -(1 - smoothing) * functional.logsigmoid(margin) - smoothing * functional.logsigmoid(-margin)
        losses = losses - PREFERENCE.chosen_weight * known[:, 0] / counts
        losses.mean().backward()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
            model.save_pretrained(folder)
            _, gradients, _ = load_hf(Path(folder), parameter_dtype=jnp.dtype("float64"))
    columns = (losses, (margin > 0).double(), margin, *rewards.T, *known.T)
    return PreferenceMeasures(*(jnp.asarray(column.mean().item()) for column in columns)), gradients


@pytest.mark.parametrize("row_length", [175, 151], ids=["packed in one row", "in two rows, with padding"])
def test_loss_measures_and_every_gradient_are_those_of_torch(x64, compiled_quickly, row_length):
    ours = pair_of_models()
    rows = ReferencedRows(pack_pairs(pairs(), row_length, VOCAB - 1), REFERENCE.reshape(-1))
    (batch,) = single_pass(rows, micro_batches=1, rows=len(rows))
    batch = jax.tree.map(lambda array: jnp.asarray(array[0]), batch)
    batch = batch._replace(weights=batch.weights.astype("float64"))
    step = jax.jit(jax.value_and_grad(PREFERENCE.loss, has_aux=True), static_argnums=1)
    (_, measures), gradients = step(ours.parameters, ours.graphdef, batch, PREFERENCE.totals_of(batch))
    expected_measures, expected_gradients = expected()
    for found, theirs in zip(measures, expected_measures, strict=True):
        assert difference(found, theirs) <= 1e-10
    errors = jax.tree_util.tree_map_with_path(
        lambda path, ours, theirs: (difference(ours, theirs), jax.tree_util.keystr(path)),
        gradients,
        jax.tree.map(jnp.asarray, expected_gradients),
    )
    worst = max(jax.tree.leaves(errors, is_leaf=lambda node: isinstance(node, tuple)))
    assert worst[0] <= 1e-10, worst
