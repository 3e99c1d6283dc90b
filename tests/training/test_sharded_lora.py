"""LoRA over eight devices is LoRA on one, with what dropout leaves out as well."""

from __future__ import annotations

import textwrap

from tests.several_devices import printed_by

PROGRAM = textwrap.dedent(
    """
    import json
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
    from qwen35_jax.logical_axes import fitting_partition
    from qwen35_jax.model import abstract_model
    from qwen35_jax.sharding import parameter_axes, shardings
    from qwen35_jax.training.lora import LoRA, adapter_axes, init_adapter
    from qwen35_jax.training.objective import Batch, Objective
    from qwen35_jax.training.train_step import init_train_state, train_step
    from tests.small_text_model import FULL, LINEAR, draw, small_config

    config = small_config((LINEAR, FULL), vocab_size=104)
    graphdef, shapes = abstract_model(config, parameter_dtype="float32", dtype="float32")
    axes = parameter_axes(graphdef, shapes)
    lora = LoRA(rank=3, dropout=0.3)
    rng = np.random.default_rng(0)
    tokens, weights = rng.integers(0, 104, (8, 12)).astype(np.int32), rng.random((8, 12)).astype(np.float32)
    # A step so long that what was there before is lost beside it: the adapter then shows its gradients.
    RATE = 2.0**20
    optimizer = optax.sgd(RATE)

    def step(sizes):
        devices = np.array(jax.devices()[: np.prod([*sizes.values()])]).reshape([*sizes.values()])
        mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        parameters = jax.tree_util.tree_map_with_path(draw, shapes)
        adapter = init_adapter(config, lora, key=jax.random.key(0))
        before = jax.tree.map(np.array, adapter)
        batch = Batch(*(array[None] for array in (tokens, np.ones_like(tokens), weights)))
        cuts = shardings(mesh, adapter_axes(adapter, axes), adapter)
        parameters = jax.device_put(parameters, shardings(mesh, axes, parameters))
        rows = PartitionSpec(None, *fitting_partition(mesh, ("batch", "time"), tokens.shape))
        with jax.set_mesh(mesh):
            state = init_train_state(jax.device_put(adapter, cuts), optimizer, seed=2)
            state, report = train_step(
                graphdef, optimizer, Objective(), state, jax.device_put(batch, NamedSharding(mesh, rows)),
                parameters, parameters_of=lora,
            )
        gradients = jax.tree.map(lambda old, new: (old - np.asarray(new)) / RATE, before, state.parameters)
        kept = jax.tree.map(lambda array, cut: array.sharding.is_equivalent_to(cut, array.ndim), state.parameters, cuts)
        whole = sum(cut.is_fully_replicated for cut in jax.tree.leaves(cuts))
        return float(report.measures.loss), gradients, all(jax.tree.leaves(kept)), whole

    expected_loss, expected, _, _ = step({"data": 1})
    loss, gradients, kept, whole = step({"data": 2, "fsdp": 2, "tensor": 2})
    norms = [float(np.linalg.norm(one)) for one in jax.tree.leaves(expected)]
    errors = jax.tree.map(lambda ours, one: float(np.linalg.norm(ours - one)), gradients, expected)
    print(json.dumps({
        "loss": abs(loss / expected_loss - 1),
        "gradients": max(jax.tree.leaves(errors)) / max(norms),
        "largest": max(norms), "kept": kept, "whole": whole,
    }))
    """
)


def test_a_step_over_a_mesh_is_that_of_one_device_and_the_adapter_is_cut_with_its_weights():
    found = printed_by(PROGRAM, devices=8)
    assert found["loss"] <= 1e-5
    assert found["gradients"] <= 1e-5
    assert found["largest"] > 1e-3
    assert found["kept"]
    assert found["whole"] == 0
