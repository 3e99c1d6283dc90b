"""A step on pairs over eight devices is the step of one, whatever the mesh, and so is what the reference says."""

from __future__ import annotations

import textwrap

from tests.several_devices import printed_by

PROGRAM = textwrap.dedent(
    """
    import json
    import jax, numpy as np, optax
    from jax.sharding import AxisType, Mesh
    from qwen35_jax.model import abstract_model
    from qwen35_jax.sharding import parameter_axes, shardings
    from qwen35_jax.training.batches import single_pass
    from qwen35_jax.training.document import Document
    from qwen35_jax.training.placement import place_batch
    from qwen35_jax.training.preference.objective import Preference, PreferenceBatch
    from qwen35_jax.training.preference.reference import reference_log_probabilities
    from qwen35_jax.training.preference.rows import pack_pairs
    from qwen35_jax.training.train_step import init_train_state, train_step
    from tests.small_text_model import FULL, LINEAR, draw, small_config

    config = small_config((LINEAR, FULL), vocab_size=104)
    graphdef, shapes = abstract_model(config, parameter_dtype="float32", dtype="float32")
    axes = parameter_axes(graphdef, shapes)
    rng = np.random.default_rng(0)
    rows = [[1] * 5 + [2] * 7 + [3] * 4 + [4] * 6 + [0] * 2, [1] * 13 + [2] * 11]  # answers over the cut in time
    segment_ids = np.repeat(rows, 4, axis=0).astype(np.int32)
    tokens = rng.integers(0, 104, segment_ids.shape).astype(np.int32)
    weights = rng.integers(0, 2, segment_ids.shape).astype(np.float32)
    weights[:, [2, 11, 14, 21]] = 1  # every document has an answer
    reference = rng.uniform(-30, -5, (8, 4)).astype(np.float32)
    # A step so long that what was there before is lost beside it: parameters then show their gradients.
    RATE = 2.0**20
    optimizer, preference = optax.sgd(RATE), Preference(chosen_weight=0.3, label_smoothing=0.1)

    documents = [
        Document(ids[of], looked_at[of] > 0)
        for ids, segments, looked_at in zip(tokens, segment_ids, weights)
        for of in (segments == number for number in range(1, segments.max() + 1))
    ]
    packed = pack_pairs(zip(documents[::2], documents[1::2]), 24)

    def step(sizes):
        devices = np.array(jax.devices()[: np.prod([*sizes.values()])]).reshape([*sizes.values()])
        mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        parameters = jax.tree_util.tree_map_with_path(draw, shapes)
        before = jax.tree.map(np.array, parameters)
        batch = PreferenceBatch(*(array[None] for array in (tokens, segment_ids, weights, reference)))
        with jax.set_mesh(mesh):
            placed = jax.device_put(parameters, shardings(mesh, axes, parameters))
            asked = reference_log_probabilities(
                graphdef,
                placed,
                packed,
                (place_batch(mesh, rows) for rows in single_pass(packed, micro_batches=1, rows=8)),
            )
            state = init_train_state(placed, optimizer)
            state, report = train_step(graphdef, optimizer, preference, state, place_batch(mesh, batch))
        gradients = jax.tree.map(lambda old, new: (old - np.asarray(new)) / RATE, before, state.parameters)
        return jax.device_get(report), gradients, asked

    expected_report, expected, expected_reference = step({"data": 1})
    # The margin is a small difference of large numbers, of whose rounding it has its share.
    scale = max(abs(float(value)) for value in expected_report.measures)
    report, gradients, asked = step({"fsdp": 2, "sequence": 2, "tensor": 2})
    found = {
        "pairs": float(report.totals.pairs),
        "loss": abs(float(report.measures.loss / expected_report.measures.loss) - 1),
        "measures": max(
            abs(float(ours - one)) / scale for ours, one in zip(report.measures, expected_report.measures)
        ),
        "reference": float(np.abs(asked / expected_reference - 1).max()),
        "gradients": max(
            (float(np.linalg.norm(ours - one) / np.linalg.norm(one)), jax.tree_util.keystr(path))
            for (path, ours), one in zip(
                jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
            )
        ),
    }
    print(json.dumps(found))
    """
)


def test_measures_gradients_and_references_of_pairs_are_those_of_one_device_where_rows_time_and_vocabulary_are_cut():
    result = printed_by(PROGRAM, devices=8)
    assert result["pairs"] == 12
    assert max(result["loss"], result["measures"], result["reference"]) <= 1e-5
    error, parameter = result["gradients"]
    assert error <= 1e-5, parameter
