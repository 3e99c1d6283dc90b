"""Where a run's arrays lie is said before any is made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from qwen35_jax.errors import ConfigError
from qwen35_jax.training.objective import Batch
from qwen35_jax.training.placement import (
    check_row_length,
    check_rows,
    held_rows,
    make_mesh,
    place_batch,
    state_shardings,
)
from qwen35_jax.training.train_step import init_train_state

MESH: Any = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
WHOLE = NamedSharding(MESH, PartitionSpec())
CUT = NamedSharding(MESH, PartitionSpec("fsdp", None))
COLUMNS = NamedSharding(MESH, PartitionSpec(None, "fsdp"))
SHAPES = {
    "a": {0: {"weight": jax.ShapeDtypeStruct((8, 12), jnp.float32)}},
    "b": {"weight": jax.ShapeDtypeStruct((4, 16), jnp.float32)},
}
CUTS = {"a": {0: {"weight": CUT}}, "b": {"weight": COLUMNS}}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, mask={"a": True, "b": False})),
    ],
)
def test_moments_lie_where_their_parameters_do(optimizer: optax.GradientTransformation) -> None:
    state = jax.eval_shape(lambda given: init_train_state(given, optimizer), SHAPES)
    placed = state_shardings(MESH, CUTS, SHAPES, state)
    assert placed.parameters == CUTS and placed.step == WHOLE and placed.key == WHOLE
    moments = [leaf for leaf in jax.tree.leaves(placed.optimizer) if leaf != WHOLE]
    assert moments == [CUT, COLUMNS] * 2


def test_what_has_another_shape_than_its_parameter_is_whole() -> None:
    state = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=2).init, SHAPES)
    placed = state_shardings(MESH, CUTS, SHAPES, state)
    assert placed.v_row["b"]["weight"] == WHOLE
    assert placed.v["a"][0]["weight"] == WHOLE


def test_rows_that_devices_cannot_share_evenly_are_refused() -> None:
    check_rows(MESH, 16)
    with pytest.raises(
        ConfigError, match=r"has 12 rows .* a multiple of the 8 devices along mesh axis data and fsdp"
    ):
        check_rows(MESH, 12)


def test_without_sizes_all_devices_are_on_fsdp_and_a_batch_is_what_it_was() -> None:
    mesh = make_mesh({})
    assert dict(mesh.shape) == {"fsdp": jax.device_count()}
    numbers = np.arange(2 * 3 * 5 * jax.device_count()).reshape(2, -1, 5)
    placed = place_batch(mesh, Batch(numbers, numbers + 1, numbers.astype(np.float32)))
    np.testing.assert_array_equal(placed.segment_ids, numbers + 1)


def test_rows_that_cannot_be_cut_along_the_sequence_axis_are_refused() -> None:
    mesh: Any = AbstractMesh((2, 4), ("fsdp", "sequence"), axis_types=(AxisType.Auto,) * 2)
    check_row_length(mesh, 24)
    with pytest.raises(ConfigError, match=r"row_length is 26, .* of the 4 devices along mesh axis sequence"):
        check_row_length(mesh, 26)


def test_one_process_holds_all_rows() -> None:
    np.testing.assert_array_equal(
        held_rows(make_mesh({}), 3 * jax.device_count()), range(3 * jax.device_count())
    )
