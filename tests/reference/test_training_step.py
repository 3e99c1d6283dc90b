"""Loss and gradients of a batch against `transformers` and torch's autograd, in float64."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.model import Parameters
from qwen35_jax.training.objective import Batch, Objective, batch_loss, totals_of
from qwen35_jax.verify.comparison import Pair, random_pair
from qwen35_jax.verify.reference import float64_arithmetic
from tests.reference.tiny_reference import VOCAB, text_config
from tests.small_text_model import difference

pytestmark = pytest.mark.reference

# Shorter than the convolution, and longer than a chunk of the delta rule; targets of 0 in front, in the middle, all.
LENGTHS = (5, 1, 2, 70, 19)
LOOKED_AT = (slice(2, None), slice(0, None), slice(0, 0), slice(11, 60), slice(1, None, 3))


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and weights (0 or 1) of each document."""
    rng = np.random.default_rng(4)
    found = []
    for length, looked_at in zip(LENGTHS, LOOKED_AT, strict=True):
        weights = np.zeros(length)
        weights[looked_at] = 1
        found.append((rng.integers(0, VOCAB, length), weights))
    return found


def arranged(rows: list[list[int]], time: int) -> Batch:
    """Documents by number into rows; -1 is padding of three tokens, which hold anything, as what is left at the end."""
    known = documents()
    tokens = np.full((len(rows), time), VOCAB - 1, np.int32)
    segment_ids, weights = np.zeros((len(rows), time), np.int32), np.ones((len(rows), time))
    for row, numbers in enumerate(rows):
        start = 0
        for segment, number in enumerate(numbers, 1):
            if number == -1:
                start += 3
                continue
            ids, looked_at = known[number]
            here = slice(start, start + len(ids))
            tokens[row, here], segment_ids[row, here], weights[row, here] = ids, segment, looked_at
            start = here.stop
    return Batch(*map(jnp.asarray, (tokens, segment_ids, weights)))


BATCHES = {
    "packed": arranged([[0, 1, 2, 3, 4]], sum(LENGTHS)),
    "packed in two rows, with padding around": arranged([[-1, 3, -1, 0], [4, 1, 2]], 85),
    "padded on the right": arranged([[0], [1], [2], [3], [4]], 72),
    "padded on the left": arranged([[-1, 0], [1], [-1, 2], [3], [-1, 4]], 75),
}


@functools.cache
def pair() -> Pair:
    return random_pair(text_config(tie_word_embeddings=True), 5, jnp.dtype("float64"))


@functools.cache
def expected() -> tuple[float, Parameters]:
    """The reference's loss, and its gradients read as a checkpoint."""
    total = sum(weights[1:].sum() for _, weights in documents())
    loss = torch.zeros((), dtype=torch.float64)
    reference = pair().reference
    with float64_arithmetic():
        reference.zero_grad()
        for tokens, weights in documents():
            count = weights[1:].sum()
            if count:
                labels = np.where(weights > 0, tokens, -100)
                ids, labels = (torch.as_tensor(x)[None] for x in (tokens, labels))
                loss = loss + reference(input_ids=ids, labels=labels, use_cache=False).loss * count / total
        loss.backward()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
            reference.save_pretrained(folder)
            _, gradients, _ = load_hf(Path(folder), parameter_dtype=jnp.dtype("float64"))
    return loss.item(), gradients


@pytest.mark.parametrize("name", BATCHES)
def test_b08_loss_and_every_gradient_are_those_of_each_document_alone(x64, compiled_quickly, name):
    batch = jax.tree.map(jnp.asarray, BATCHES[name])
    batch = batch._replace(weights=batch.weights.astype("float64"))
    step = jax.jit(jax.value_and_grad(batch_loss, has_aux=True), static_argnums=(1, 4))
    (loss, measures), gradients = step(
        pair().parameters, pair().graphdef, batch, totals_of(batch), Objective()
    )
    expected_loss, expected_gradients = expected()
    assert abs(float(loss) / expected_loss - 1) <= 1e-10
    assert float(measures.cross_entropy) == float(loss)
    errors = jax.tree_util.tree_map_with_path(
        lambda path, ours, theirs: (difference(ours, theirs), jax.tree_util.keystr(path)),
        gradients,
        jax.tree.map(jnp.asarray, expected_gradients),
    )
    worst = max(jax.tree.leaves(errors, is_leaf=lambda node: isinstance(node, tuple)))
    assert worst[0] <= 1e-10, worst
