"""A step over eight devices is the step of one, whatever the mesh, and what the rules cut is cut."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.several_devices import printed_by

MESHES = {
    "rows over data": {"data": 8},
    "rows and weights over fsdp": {"fsdp": 8},
    "rows over data, heads over tensor": {"data": 2, "tensor": 4},
    "rows, weights and heads": {"data": 2, "fsdp": 2, "tensor": 2},
    "weights, time and heads": {"fsdp": 2, "sequence": 2, "tensor": 2},
    "time over more parts than a convolution is long": {"sequence": 8},
    "two key heads over four devices": {"tensor": 4},
    "two key heads over eight devices": {"tensor": 8},
}

PROGRAM = textwrap.dedent(
    """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
    from qwen35_jax.logical_axes import fitting_partition
    from qwen35_jax.model import abstract_model
    from qwen35_jax.sharding import parameter_axes, shardings
    from qwen35_jax.sharding.rules import LogicalAxes
    from qwen35_jax.training.objective import Batch, Objective
    from qwen35_jax.training.train_step import init_train_state, train_step
    from tests.small_text_model import FULL, LINEAR, draw, small_config

    config = small_config(
        (LINEAR, FULL), vocab_size=104, num_attention_heads=8, linear_num_value_heads=8, hidden_size=48
    )
    graphdef, shapes = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    axes = parameter_axes(graphdef, shapes)
    rng = np.random.default_rng(0)
    segment_ids = np.repeat([[1] * 9 + [2] * 12 + [0] * 3, [1] * 24], 4, axis=0).astype(np.int32)
    tokens = rng.integers(0, 104, segment_ids.shape).astype(np.int32)
    weights = rng.integers(0, 2, segment_ids.shape).astype(np.float32)
    # A step so long that what was there before is lost beside it: parameters then show their gradients.
    RATE = 2.0**20
    optimizer, objective = optax.sgd(RATE), Objective(mtp_weight=0.3)

    def step(mesh):
        parameters = jax.tree_util.tree_map_with_path(draw, shapes)
        before = jax.tree.map(np.array, parameters)
        batch = Batch(*(array[None] for array in (tokens, segment_ids, weights)))
        parameters = jax.device_put(parameters, shardings(mesh, axes, parameters))
        batch = jax.device_put(
            batch, NamedSharding(mesh, PartitionSpec(None, *fitting_partition(mesh, ("batch", "time"), (8, 24))))
        )
        with jax.set_mesh(mesh):
            state = init_train_state(parameters, optimizer)
            state, report = train_step(graphdef, optimizer, objective, state, batch)
        gradients = jax.tree.map(lambda old, new: (old - np.asarray(new)) / RATE, before, state.parameters)
        return float(report.measures.loss), gradients, state.parameters

    def mesh_of(sizes):
        devices = np.array(jax.devices()[: np.prod([*sizes.values()])]).reshape([*sizes.values()])
        return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    expected_loss, expected, _ = step(mesh_of({"data": 1}))
    found = {}
    for name, sizes in json.loads(sys.argv[1]).items():
        mesh = mesh_of(sizes)
        loss, gradients, parameters = step(mesh)
        wanted = shardings(mesh, axes, shapes)
        whole = [
            jax.tree_util.keystr(path)
            for (path, array), cut in zip(
                jax.tree_util.tree_leaves_with_path(parameters), jax.tree.leaves(wanted), strict=True
            )
            if not array.sharding.is_equivalent_to(cut, array.ndim)
        ]
        found[name] = {
            "loss": abs(loss / expected_loss - 1),
            "gradients": max(
                (float(np.linalg.norm(ours - one) / np.linalg.norm(one)), jax.tree_util.keystr(path))
                for (path, ours), one in zip(
                    jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
                )
            ),
            "not cut as the rules say": whole,
            "cut": sum(not cut.is_fully_replicated for cut in jax.tree.leaves(wanted)),
        }
    print(json.dumps(found))
    """
)


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return printed_by(PROGRAM, json.dumps(MESHES), devices=8)


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_are_those_of_one_device_and_nothing_is_whole_that_is_to_be_cut(found, name):
    result = found[name]
    assert result["loss"] <= 1e-5
    error, parameter = result["gradients"]
    assert error <= 1e-5, parameter
    assert result["not cut as the rules say"] == []
    assert (result["cut"] > 20) == (not MESHES[name].keys() <= {"data", "sequence"})
