"""Scores and beams with parameters cut over a mesh are those of one device."""

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
    import jax, numpy as np
    from jax.sharding import Mesh
    from qwen35_jax.inference.beam_search import beam_search
    from qwen35_jax.inference.scoring import Continuation, _score_chunk, score
    from qwen35_jax.model import abstract_model
    from qwen35_jax.sharding import parameter_axes, shardings
    from tests.inference.tiny_model import TinyModel
    from tests.small_text_model import FULL, LINEAR, draw, small_config

    assert len(jax.devices()) == 8
    jax.config.update("jax_disable_most_optimizations", True)
    config = small_config(
        (LINEAR, FULL), vocab_size=104, num_attention_heads=8, num_key_value_heads=4, linear_num_key_heads=4,
        linear_num_value_heads=8, max_position_embeddings=700,
    )
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32")
    parameters = jax.tree_util.tree_map_with_path(draw, abstract)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    cut = jax.device_put(parameters, shardings(mesh, parameter_axes(graphdef, parameters), parameters))
    alone, together = (TinyModel(config, graphdef, each) for each in (parameters, cut))

    source = np.random.default_rng(0)
    def ids(length):
        return source.integers(0, 104, length).tolist()

    question = ids(20)
    wanted = [Continuation(question, ids(length)) for length in (1, 3, 5)]
    wanted += [Continuation(ids(7), ids(30)), Continuation(ids(1), ids(2))]
    expected = score(alone, wanted, batch=3).scores
    programs = _score_chunk._cache_size()
    found = score(together, wanted, batch=3).scores  # filled up to 4 rows
    compiled = _score_chunk._cache_size() - programs

    beams = [  # 3 rows do not divide, and lie whole on every device
        [beam_search(model, question, beams=beams, max_new_tokens=8, stop_ids=(5, 9)) for beams in (3, 4)]
        for model in (alone, together)
    ]
    print(json.dumps({
        "difference": max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(expected, found)),
        "programs": [programs, compiled],
        "beams": [[[beam.tokens for beam in answers] for answers in each] for each in beams],
    }))
    """
)


@pytest.mark.extended
def test_eight_devices_give_the_scores_and_the_beams_of_one() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["difference"] < 2e-5
    assert found["programs"][0] == found["programs"][1] > 0
    assert found["beams"][0] == found["beams"][1]
    assert [len(answers) for answers in found["beams"][0]] == [3, 4]
