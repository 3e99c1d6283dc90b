"""One table of logical axes cuts a model over a mesh, and changes no answer."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from qwen35_jax.cache import init_cache
from qwen35_jax.errors import ConfigError
from qwen35_jax.logical_axes import MESH_AXES, RULES
from qwen35_jax.model import abstract_model
from qwen35_jax.sharding import cache_shardings, parameter_axes, shardings
from qwen35_jax.sharding.rules import CACHE_AXES, LogicalAxes
from tests.small_text_model import FULL, LINEAR, small_config

# Of activations and adapters, which neither parameters nor caches have.
OTHER_AXES = {"time", "residual", "rank"}

# All heads divide over four devices.
CONFIG = small_config(
    (LINEAR, LINEAR, LINEAR, FULL),
    vocab_size=104,
    num_attention_heads=8,
    num_key_value_heads=4,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
)


def test_every_parameter_names_as_many_axes_as_it_has():
    graphdef, parameters = abstract_model(CONFIG, parameter_dtype=jnp.float32, dtype=jnp.float32, mtp=True)
    axes = parameter_axes(graphdef, parameters)
    counts = jax.tree.map(
        lambda logical, array: (len(logical.names), array.ndim),
        axes,
        parameters,
        is_leaf=lambda node: isinstance(node, LogicalAxes),
    )
    pairs = jax.tree.leaves(counts, is_leaf=lambda node: isinstance(node, tuple))
    assert len(pairs) > 40
    assert all(named == axes for named, axes in pairs)


def test_every_rule_is_for_an_axis_that_is_there_and_every_mesh_axis_cuts_something():
    """A mesh axis over which nothing is cut would leave its devices to repeat each other's work without a word."""
    graphdef, parameters = abstract_model(CONFIG, parameter_dtype=jnp.float32, dtype=jnp.float32, mtp=True)
    named = jax.tree.leaves(
        parameter_axes(graphdef, parameters), is_leaf=lambda node: isinstance(node, LogicalAxes)
    )
    names = {name for logical in named for name in logical.names}
    names |= {name for axes in CACHE_AXES.values() for name in axes}
    assert names | OTHER_AXES == set(RULES)
    assert set(MESH_AXES) == {axis for axes in RULES.values() for axis in axes}
    with pytest.raises(
        ConfigError,
        match=r"unknown axes \['expert'\]; expected some of \['data', 'fsdp', 'sequence', 'tensor'\]",
    ):
        shardings(_abstract_mesh(expert=2), {}, {})


@pytest.mark.parametrize(
    ("devices", "axes", "shape", "complaint"),
    [
        (
            3,
            ("heads", "embed"),
            (4, 48),
            r"4 heads do not divide over 3 devices of mesh axis 'tensor'; choose a size",
        ),
        (3, ("kv_heads", "embed"), (2, 48), r"2 kv_heads do not divide over 3 devices"),
        (2, ("vocab", "embed"), (97, 48), r"97 vocab do not divide over 2 devices"),
    ],
)
def test_b75_what_does_not_divide_is_refused_by_name_before_any_compile(devices, axes, shape, complaint):
    mesh = _abstract_mesh(tensor=devices)
    with pytest.raises(ConfigError, match=complaint):
        shardings(mesh, LogicalAxes(axes), jnp.zeros(shape))


def test_b75_shared_heads_fewer_than_shards_are_replicated():
    mesh = _abstract_mesh(tensor=8)
    axes = {"k": LogicalAxes(("kv_heads", "embed")), "q": LogicalAxes(("heads", "embed"))}
    cut = shardings(mesh, axes, {"k": jnp.zeros((2, 48)), "q": jnp.zeros((8, 48))})
    assert cut["k"].spec == PartitionSpec(None, None)
    assert cut["q"].spec == PartitionSpec("tensor", None)


def test_a_cache_is_cut_where_its_rows_and_heads_divide_and_whole_elsewhere():
    def specs(rows: int, **sizes: int) -> dict[str, PartitionSpec]:
        cache = jax.eval_shape(lambda: init_cache(CONFIG.text, batch=rows, capacity=16, dtype=jnp.float32))
        cut = cache_shardings(_abstract_mesh(**sizes), cache)
        delta_net, attention = cut.groups[0][0], cut.groups[-1][-1]
        named = {"window": delta_net.window_k, "state": delta_net.state, "key": attention.key}
        return {name: sharding.spec for name, sharding in named.items()} | {"lengths": cut.lengths.spec}

    assert specs(6, data=2, tensor=4) == {
        "window": PartitionSpec(None, "data", None, "tensor", None),
        "state": PartitionSpec(None, "data", "tensor", None, None),
        "key": PartitionSpec(None, "data", None, "tensor", None),
        "lengths": PartitionSpec("data"),
    }
    # Three rows over two devices, and four key heads over eight: whole. Eight value heads are still cut.
    assert specs(3, data=2, tensor=8) == {
        "window": PartitionSpec(None, None, None, None, None),
        "state": PartitionSpec(None, None, "tensor", None, None),
        "key": PartitionSpec(None, None, None, None, None),
        "lengths": PartitionSpec(None),
    }
    assert specs(6, fsdp=2)["key"] == PartitionSpec(None, "fsdp", None, None, None)
    assert specs(6, data=3, fsdp=2)["lengths"] == PartitionSpec(("data", "fsdp"))


def _abstract_mesh(**sizes: int) -> jax.sharding.AbstractMesh:
    auto = (AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


EIGHT_DEVICES = textwrap.dedent(
    """
    import json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh
    from qwen35_jax.cache import init_cache
    from qwen35_jax.model import decode_step, init_model, prefill
    from qwen35_jax.sharding import cache_axes, parameter_axes, shardings
    from tests.sharding.test_rules import CONFIG

    graphdef, parameters = init_model(CONFIG, seed=3, parameter_dtype=jnp.float32, dtype=jnp.float32)
    tokens = jax.random.randint(jax.random.key(1), (4, 23), 0, CONFIG.text.vocab_size)

    def run(parameters, place_cache):
        cache = place_cache(init_cache(CONFIG.text, batch=4, capacity=32, dtype=jnp.float32))
        logits, cache = prefill(graphdef, parameters, tokens[:, :21], cache)
        steps = [logits]
        for t in (21, 22):
            logits, cache = decode_step(graphdef, parameters, tokens[:, t], cache)
            steps.append(logits)
        return np.stack(steps), cache

    alone, _ = run(parameters, lambda cache: cache)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    axes = parameter_axes(graphdef, parameters)
    cut = jax.device_put(parameters, shardings(mesh, axes, parameters))
    together, cache = run(
        cut, lambda cache: jax.device_put(cache, shardings(mesh, cache_axes(cache), cache))
    )
    mixer = cut["decoder"]["groups"][0]["layers"][0]["mixer"]
    print(json.dumps({
        "difference": float(abs(together - alone).max() / abs(alone).max()),
        "value_heads_per_device": mixer["v_weight"].addressable_shards[0].data.shape[1],
        "state_heads_per_device": cache.groups[0][0].state.addressable_shards[0].data.shape[2],
    }))
    """
)


def test_heads_over_eight_devices_equal_one_device():
    result = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES],
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["difference"] < 1e-5
    assert seen["value_heads_per_device"] == 2
    assert seen["state_heads_per_device"] == 2


def test_a_mesh_whose_axes_are_explicit_is_refused_with_what_to_do():
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ConfigError, match=r"Explicit, expected Auto ones: jax\.make_mesh"):
        shardings(mesh, LogicalAxes(("embed",)), jnp.zeros(8))
