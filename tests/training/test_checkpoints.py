"""What is saved comes back leaf by leaf, or the next start says what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qwen35_jax.errors import CheckpointError
from qwen35_jax.training.checkpoints import Checkpoints
from qwen35_jax.training.train_step import TrainState, init_train_state

OPTIMIZER = optax.adamw(0.1)
SETTINGS = {"run": {"steps": 9}}


def state_after(step: int, **more: Any) -> TrainState:
    """A state in which no array is zero, and no two are alike."""
    parameters = {"layers": {0: {"weight": jnp.ones((3, 5))}, 1: {"weight": jnp.ones((5, 2))}}, **more}
    state = init_train_state(parameters, OPTIMIZER, seed=7)._replace(step=jnp.int32(step))
    leaves, structure = jax.tree.flatten((state.parameters, state.optimizer))
    filled = [leaf + index + 1 + step for index, leaf in enumerate(leaves)]
    parameters, optimizer = jax.tree.unflatten(structure, filled)
    return state._replace(parameters=parameters, optimizer=optimizer)


def shapes_of(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(one: TrainState, other: TrainState) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, left), right in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right, err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4; that of step 1 was not kept."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 4):
            checkpoints.save(state_after(step), SETTINGS, {"next": step + 1})
    return tmp_path


def test_b78_every_leaf_comes_back_with_the_settings_and_the_position(folder: Path) -> None:
    with Checkpoints(folder, keep=2) as checkpoints:
        saved = checkpoints.latest()
        assert saved == (4, SETTINGS, {"next": 5})
        restored = checkpoints.restore(4, shapes_of(state_after(0)))
    assert_same(restored, state_after(4))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(restored.optimizer))


def test_only_the_newest_are_kept(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]


def test_arrays_may_be_given_away_while_they_are_written(tmp_path: Path) -> None:
    state = state_after(3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, SETTINGS, {})
        overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
        jax.block_until_ready(overwrite((state.parameters, state.optimizer)))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert_same(checkpoints.restore(3, shapes_of(state_after(0))), state_after(3))


def without_moments(state: TrainState) -> TrainState:
    return state._replace(optimizer=optax.sgd(0.1).init(state.parameters))


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (lambda: state_after(0, bias=jnp.ones(6)), r"4: 'optimizer\.0\.mu\.bias' is missing"),
        (lambda: without_moments(state_after(0)), r"4: 'optimizer\.0\.count' belongs to no part of this run"),
        (
            lambda: state_after(0)._replace(step=jnp.ones(2)),
            r"4: 'step' is int32 \[\], expected float32 \[2\]",
        ),
    ],
)
def test_b78_a_missing_an_extra_and_another_leaf_are_refused(
    folder: Path, wanted: Any, complaint: str
) -> None:
    with Checkpoints(folder, keep=2) as checkpoints, pytest.raises(CheckpointError, match=complaint):
        checkpoints.restore(4, shapes_of(wanted()))


def test_b78_what_a_killed_save_left_is_no_checkpoint_and_is_removed(folder: Path) -> None:
    partial = folder / "6.orbax-checkpoint-tmp"
    shutil.copytree(folder / "4", partial)
    shutil.rmtree(partial / "run")
    with Checkpoints(folder, keep=2) as checkpoints:
        saved = checkpoints.latest()
        assert saved is not None and saved.step == 4
        assert not partial.exists()
        checkpoints.save(state_after(6), SETTINGS, {})
    with Checkpoints(folder, keep=2) as checkpoints:
        assert_same(checkpoints.restore(6, shapes_of(state_after(0))), state_after(6))


def test_a_damaged_checkpoint_is_named(folder: Path) -> None:
    (folder / "4" / "state" / "_METADATA").write_text("{")
    with Checkpoints(folder, keep=2) as checkpoints, pytest.raises(CheckpointError, match="4 cannot be read"):
        checkpoints.restore(4, shapes_of(state_after(0)))
    (folder / "4" / "run" / "metadata").write_text("{")
    with Checkpoints(folder, keep=2) as checkpoints, pytest.raises(CheckpointError, match="4 cannot be read"):
        checkpoints.latest()


def test_a_checkpoint_that_cannot_be_written_is_an_error(folder: Path) -> None:
    with Checkpoints(folder, keep=2) as checkpoints:
        shutil.rmtree(folder)
        folder.write_text("in the way")
        with pytest.raises(CheckpointError, match="a checkpoint could not be written"):
            checkpoints.save(state_after(5), SETTINGS, {})
