"""The engine with parameters cut over a mesh: slots and remembered prefixes are cut with them, and no token changes."""

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
    import json, math, re
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh
    from qwen35_jax.inference.engine import Engine, Request
    from qwen35_jax.inference.engine.slot_runner import compiled_programs
    from qwen35_jax.inference.engine.slots import decode_slot, prefill_slot, start_slot
    from qwen35_jax.inference.engine.snapshots import read_block, take_snapshot
    from qwen35_jax.inference.settings import GenerationSettings
    from qwen35_jax.inference.speculation import Speculation
    from qwen35_jax.model import abstract_model
    from qwen35_jax.sharding import parameter_axes, shardings
    from tests.inference.tiny_model import TinyModel
    from tests.small_text_model import FULL, LINEAR, draw, small_config

    assert len(jax.devices()) == 8
    config = small_config(
        (LINEAR, FULL), vocab_size=104, num_attention_heads=8, num_key_value_heads=4, linear_num_key_heads=4,
        linear_num_value_heads=8, max_position_embeddings=700,
    )
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    parameters = jax.tree_util.tree_map_with_path(draw, abstract)

    def over(data, tensor):
        mesh = Mesh(np.array(jax.devices()).reshape(data, tensor), ("data", "tensor"))
        return jax.device_put(parameters, shardings(mesh, parameter_axes(graphdef, parameters), parameters))

    def text(length, seed):
        return tuple(np.random.default_rng(seed).integers(0, 60, length).tolist())

    def request(prompt, seed, new):
        drawn = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2} if seed % 2 else {}
        return Request(prompt, GenerationSettings(max_new_tokens=new, seed=seed, **drawn), stop_ids=(7,))

    beginning = text(70, 100)
    at_once = [request(text(length, length), length, 5 + length % 6) for length in (1, 3, 16, 33, 64, 65)]
    at_once += [request(beginning + text(5, seed), seed, 9) for seed in (8, 9)]
    in_turn = [
        request(beginning + text(5, 8), 8, 9), request(beginning + text(9, 11), 3, 9),
        request(beginning[:30], 5, 20), request(beginning + text(5, 9), 10, 9),
    ]

    def moved_at_once(text):
        \"\"\"For every array that a compiled program sends between devices, how many numbers it has.\"\"\"
        sent = re.findall(r"= (.*) all-(?:gather|reduce|to-all)(?:-start)?[(]", text)
        shapes = [sizes.split(",") for each in sent for sizes in re.findall(r"[[]([0-9,]+)[]]", each)]
        return [math.prod(map(int, shape)) for shape in shapes]

    def of_programs_on_one_slot(runner):
        where, tokens = jnp.int32(0), np.zeros((1, 32), np.int32)
        slots, placement = runner._slots, runner._placement
        one = *runner._static, slots, where
        allowed = runner._anything[1]
        lowered = {
            "prefill_slot": prefill_slot.lower(*one, tokens, tokens),
            "start_slot": start_slot.lower(*one, allowed),
            "decode_slot": decode_slot.lower(*one, np.array([True]), allowed, steps=8),
            "read_block": read_block.lower(placement, slots.memory, where, where),
            "take_snapshot": take_snapshot.lower(placement, slots.memory, where),
        }
        return {name: moved_at_once(program.compile().as_text()) for name, program in lowered.items()}

    def seen(parameters, **options):
        model = TinyModel(config, graphdef, parameters)
        with Engine(model, context=128, prefill_tokens=32, prefix_cache_bytes=2**26, **options) as engine:
            before = compiled_programs()
            streams = [engine.submit(each) for each in at_once]
            found = [stream.result(timeout=300) for stream in streams]
            alone = [engine.submit(each).result(timeout=300) for each in in_turn]
            compiled = compiled_programs() - before
        slots, placement = engine._runner._slots, engine._runner._placement
        lie = jax.tree.map(
            lambda array, wanted: array.sharding.is_equivalent_to(wanted, array.ndim), slots, placement.shardings(slots)
        )
        delta_net, attention = slots.memory.cache.groups[0]
        kept = [block.content for block in engine._prefixes._blocks.values()]
        kept += [prefix.snapshot for prefix in engine._prefixes._prefixes.values()]
        arrays = jax.tree.leaves(kept)
        return {
            "tokens": [each.tokens for each in found + alone],
            "cached": [each.cached_tokens for each in alone],
            "compiled": compiled,
            "numbers moved at once": of_programs_on_one_slot(engine._runner) if options["slots"] == 4 else None,
            "lie as the rules say": jax.tree.all(lie),
            "one device's part": {
                "state": delta_net.state.sharding.shard_shape(delta_net.state.shape),
                "key": attention.key.sharding.shard_shape(attention.key.shape),
                "value": attention.value.sharding.shard_shape(attention.value.shape),
                "lengths": slots.memory.cache.lengths.sharding.shard_shape(slots.memory.cache.lengths.shape),
                "seen": slots.rows.seen.sharding.shard_shape(slots.rows.seen.shape),
                "kept key": kept[0].main[0].key.sharding.shard_shape(kept[0].main[0].key.shape),
            },
            "kept in": sorted({array.sharding.memory_kind for array in arrays}),
            "held": engine.statistics().prefix_cache.held,
            "bytes of what is kept": sum(
                shard.data.nbytes for array in arrays for shard in array.addressable_shards
            ),
        }

    print(json.dumps({
        "one device": seen(parameters, slots=3),
        "rows and heads cut": seen(
            over(2, 4), slots=4, speculation=Speculation(2), prefix_cache_place="device"
        ),
        "more devices than key heads": seen(over(1, 8), slots=3),
    }))
    """
)
MESHES = ("rows and heads cut", "more devices than key heads")


@pytest.fixture(scope="module")
def seen() -> dict:
    """What one process with eight CPU devices found."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = pytest.mark.extended


@pytest.mark.parametrize("mesh", MESHES)
def test_answers_over_eight_devices_are_those_of_one(seen: dict, mesh: str) -> None:
    assert seen[mesh]["tokens"] == seen["one device"]["tokens"]
    assert len({token for answer in seen[mesh]["tokens"] for token in answer}) > 30


@pytest.mark.parametrize("mesh", MESHES)
def test_b94_nothing_is_compiled_after_the_warm_up(seen: dict, mesh: str) -> None:
    assert seen[mesh]["compiled"] == 0


def test_rows_and_heads_of_the_slots_stay_cut_whatever_has_run_in_them(seen: dict) -> None:
    repeats, slots, capacity = 1, 4, 128
    assert all(seen[mesh]["lie as the rules say"] for mesh in MESHES)
    assert seen["rows and heads cut"]["one device's part"] == {
        "state": [repeats, slots // 2, 8 // 4, 16, 12],
        "key": [repeats, slots // 2, capacity, 4 // 4, 32],
        "value": [repeats, slots // 2, capacity, 4 // 4, 32],
        "lengths": [slots // 2],
        "seen": [slots // 2, 104],
        "kept key": [repeats, 1, 64, 4 // 4, 32],
    }
    # Four key heads are shared by two devices each, which both hold all of them.
    assert seen["more devices than key heads"]["one device's part"] == {
        "state": [repeats, 3, 8 // 8, 16, 12],
        "key": [repeats, 3, capacity, 4, 32],
        "value": [repeats, 3, capacity, 4, 32],
        "lengths": [3],
        "seen": [3, 104],
        "kept key": [repeats, 1, 64, 4, 32],
    }


def test_programs_for_one_slot_do_not_fetch_the_keys_of_the_others(seen: dict) -> None:
    keys_of_a_slot = 128 * (4 // 4) * 32  # on each device
    for program, moved in seen["rows and heads cut"]["numbers moved at once"].items():
        assert 0 < max(moved) <= keys_of_a_slot, program


@pytest.mark.parametrize(
    ("mesh", "place"), [("rows and heads cut", "device"), ("more devices than key heads", "pinned_host")]
)
def test_b35_prefixes_are_remembered_over_a_mesh_and_every_copy_counts(
    seen: dict, mesh: str, place: str
) -> None:
    assert seen[mesh]["cached"] == seen["one device"]["cached"] == [64, 64, 0, 64]
    assert seen[mesh]["kept in"] == [place]
    assert seen[mesh]["held"] == seen[mesh]["bytes of what is kept"] > 0
