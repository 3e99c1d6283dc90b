"""A checkpoint's packed rows [q | k | v] are cut so that every device has whole heads of each part."""

from __future__ import annotations

import textwrap

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen35_jax.checkpoint import export_hf
from qwen35_jax.model import abstract_model
from tests.several_devices import printed_by
from tests.small_text_model import FULL, LINEAR, draw, small_config

# 8 rows of q, 8 of k, 12 of v: half of the 28, taken as they lie, would be q and a part of k.
CONFIG = small_config(
    (LINEAR, FULL),
    vocab_size=98,
    linear_num_key_heads=2,
    linear_key_head_dim=4,
    linear_num_value_heads=4,
    linear_value_head_dim=3,
)
MIXER = "model.layers.0.linear_attn."

PROGRAM = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, Mesh
    from qwen35_jax.checkpoint.hf import load_hf
    from qwen35_jax.model import abstract_model, forward
    from qwen35_jax.sharding import parameter_axes, shardings
    from tests.sharding.test_packed_projections import CONFIG

    folder = Path(sys.argv[1])
    graphdef, shapes = abstract_model(CONFIG, parameter_dtype="float32", dtype="float32")
    mesh = Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,))
    cuts = shardings(mesh, parameter_axes(graphdef, shapes), shapes)
    _, parameters, _ = load_hf(folder / "model", shardings=cuts)
    mixer = parameters["decoder"]["groups"][0]["layers"][0]["mixer"]
    shards = {}
    for name, array in mixer.items():
        for shard in array.addressable_shards:
            shards[f"{name}/{shard.device.id}"] = np.asarray(shard.data)
    np.savez(folder / "shards.npz", **shards)
    tokens = jnp.array([[5, 17, 3, 60, 96, 2, 2, 41, 8]])
    whole = load_hf(folder / "model")[1]
    alone = jax.jit(forward, static_argnums=0)(graphdef, whole, tokens)
    with jax.set_mesh(mesh):
        together = jax.jit(forward, static_argnums=0)(graphdef, parameters, tokens)
    print(json.dumps(float(abs(together - alone).max() / abs(alone).max())))
    """
)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The error over two devices, the tensors of the file, and what each device holds of the first layer."""
    folder = tmp_path_factory.mktemp("packed")
    _, shapes = abstract_model(CONFIG, parameter_dtype="float32", dtype="float32")
    export_hf(jax.tree_util.tree_map_with_path(draw, shapes), CONFIG, folder / "model")
    tensors = load_file(folder / "model" / "model.safetensors")
    return printed_by(PROGRAM, str(folder), devices=2), tensors, dict(np.load(folder / "shards.npz"))


def test_b76_logits_over_two_devices_are_those_of_one(found):
    assert found[0] < 1e-5


@pytest.mark.parametrize("device", [0, 1])
def test_b76_each_device_holds_whole_heads_of_every_part(found, device):
    _, tensors, shards = found
    rows = tensors[MIXER + "in_proj_qkv.weight"]
    kernel = tensors[MIXER + "conv1d.weight"][:, 0]
    assert rows.shape[0] == kernel.shape[0] == 28
    q, k, v = slice(0, 8), slice(8, 16), slice(16, 28)
    for part, name, heads, dim in ((q, "q", 2, 4), (k, "k", 2, 4), (v, "v", 4, 3)):
        half = slice(device * heads // 2, (device + 1) * heads // 2)
        np.testing.assert_array_equal(
            shards[f"{name}_weight/{device}"][0], rows[part].reshape(heads, dim, -1)[half]
        )
        np.testing.assert_array_equal(
            shards[f"conv_{name}/{device}"][0], np.moveaxis(kernel[part].reshape(heads, dim, -1)[half], -1, 0)
        )
    half = slice(device * 2, device * 2 + 2)
    z = tensors[MIXER + "in_proj_z.weight"].reshape(4, 3, -1)
    np.testing.assert_array_equal(shards[f"z_weight/{device}"][0], z[half])
    for name, tensor in (
        ("b_weight", "in_proj_b.weight"),
        ("a_weight", "in_proj_a.weight"),
        ("A_log",) * 2,
        ("dt_bias",) * 2,
    ):
        np.testing.assert_array_equal(shards[f"{name}/{device}"][0], tensors[MIXER + tensor][half])
    out = tensors[MIXER + "out_proj.weight"].reshape(-1, 4, 3)
    np.testing.assert_array_equal(shards[f"out_weight/{device}"][0], out[:, half])
