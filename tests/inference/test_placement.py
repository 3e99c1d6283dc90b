"""Generation with parameters cut over a mesh: the cache is cut with them, and no token changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ON_EIGHT_DEVICES = textwrap.dedent(
    """
    import json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh
    from qwen35_jax.inference.generation import _Run, generate
    from qwen35_jax.inference.programs import decode_block, prefill_chunk
    from qwen35_jax.inference.rows import fresh_rows
    from qwen35_jax.inference.settings import GenerationSettings
    from qwen35_jax.model import abstract_model
    from qwen35_jax.sharding import parameter_axes, shardings
    from tests.inference.tiny_model import TinyModel
    from tests.small_text_model import FULL, LINEAR, draw, small_config

    assert len(jax.devices()) == 8
    config = small_config(
        (LINEAR, FULL), vocab_size=104, num_attention_heads=8, num_key_value_heads=4, linear_num_key_heads=4,
        linear_num_value_heads=8, max_position_embeddings=700,
    )
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32")
    parameters = jax.tree_util.tree_map_with_path(draw, abstract)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    cut = jax.device_put(parameters, shardings(mesh, parameter_axes(graphdef, parameters), parameters))
    alone, together = (TinyModel(config, graphdef, each) for each in (parameters, cut))

    prompts = [np.random.default_rng(n).integers(0, 104, n).tolist() for n in (3, 11, 14, 40)]
    greedy = GenerationSettings(max_new_tokens=6)
    drawn = [GenerationSettings(max_new_tokens=6, temperature=1.0, top_p=0.95, seed=row) for row in range(4)]

    def tokens(model):
        runs = (prompts, greedy), (prompts, drawn), (prompts[1:], greedy)  # the last: rows that do not divide
        return [[row.tokens for row in generate(model, *run).generations] for run in runs]

    expected = tokens(alone)
    before = prefill_chunk._cache_size(), decode_block._cache_size()
    found = tokens(together)
    compiled = prefill_chunk._cache_size() - before[0], decode_block._cache_size() - before[1]

    run = _Run(together, prompts, [greedy] * 4, None, (), lambda event: None, None)
    place = run.placement
    memory = run._empty()
    rows, sampling, limits = place.put((fresh_rows(run.prompts, 104, [True] * 4), run.sampling, run.limits))
    for chunk in run._padded_chunks():
        memory = prefill_chunk(graphdef, place, cut, memory, *chunk)
    cache = memory.cache
    delta_net, attention = cache.groups[0]
    after_prefill = {
        "window_q": delta_net.window_q, "window_k": delta_net.window_k, "window_v": delta_net.window_v,
        "state": delta_net.state, "key": attention.key, "value": attention.value, "lengths": cache.lengths,
    }
    parts = {name: [array.shape, array.sharding.shard_shape(array.shape)] for name, array in after_prefill.items()}
    once = jax.tree.map(lambda array: array.sharding, cache)
    block = decode_block(graphdef, place, cut, memory, rows, np.ones(4, bool), sampling, limits, steps=2)
    cache, rows = block[0].cache, block[1]
    stays = jax.tree.all(jax.tree.map(lambda array, s: array.sharding.is_equivalent_to(s, array.ndim), cache, once))
    print(json.dumps({
        "expected": expected, "found": found, "parts": parts, "stays": stays, "compiled": compiled,
        "rows": rows.seen.sharding.shard_shape(rows.seen.shape),
    }))
    """
)


@pytest.fixture(scope="module")
def seen() -> dict:
    """What one process with eight CPU devices found: data 2, tensor 4."""
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        env=os.environ | flags,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_tokens_over_eight_devices_are_those_of_one(seen: dict) -> None:
    assert seen["found"] == seen["expected"]
    assert len({token for run in seen["found"] for row in run for token in row}) > 20


def test_rows_and_heads_of_the_cache_are_cut_after_prefill_and_stay_so(seen: dict) -> None:
    repeats, batch, window, capacity = 1, 4, 3, 512
    assert seen["parts"] == {
        "window_q": [[repeats, batch, window, 4, 16], [repeats, 2, window, 1, 16]],
        "window_k": [[repeats, batch, window, 4, 16], [repeats, 2, window, 1, 16]],
        "window_v": [[repeats, batch, window, 8, 12], [repeats, 2, window, 2, 12]],
        "state": [[repeats, batch, 8, 16, 12], [repeats, 2, 2, 16, 12]],
        "key": [[repeats, batch, capacity, 4, 32], [repeats, 2, capacity, 1, 32]],
        "value": [[repeats, batch, capacity, 4, 32], [repeats, 2, capacity, 1, 32]],
        "lengths": [[batch], [2]],
    }
    assert seen["rows"] == [2, 104]
    assert seen["stays"]


def test_b94_a_loop_on_a_mesh_compiles_each_program_once(seen: dict) -> None:
    # Prompts of 40 tokens are padded to one length, and three rows are filled up to four.
    assert seen["compiled"] == [1, 1]
