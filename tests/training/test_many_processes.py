"""Two processes of four devices are one process of eight: in losses, checkpoints and files, and they end together."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen35_jax.checkpoint.source import convert
from qwen35_jax.training.trainer import Trainer
from tests.training.small_run import STEPS, small_run, write_model, write_texts

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
DONE = {"steps": STEPS, "began_at": 0, "stopped_by": None}

PROGRAM = textwrap.dedent(
    """
    import json, os, signal, sys
    from pathlib import Path
    import jax, numpy as np
    from qwen35_jax.checkpoint.safetensors_file import StoredTensor
    from qwen35_jax.training import preparation, trainer
    from qwen35_jax.training.guard import TrainingError
    from qwen35_jax.training.objective import Batch
    from qwen35_jax.training.placement import held_rows, make_mesh, place_batch
    from qwen35_jax.training.processes import joined, largest
    from qwen35_jax.training.rendezvous import ProcessPlace
    from tests.training.small_run import small_run

    folder, address, count, index = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    make, made = preparation.make_optimizer, {}

    def made_once(settings, axes, *, steps):  # so that a second run of the same part of a model compiles nothing
        key = settings, steps, len(jax.tree.leaves(axes))
        if key not in made:
            made[key] = make(settings, axes, steps=steps)
        return made[key]

    preparation.make_optimizer = made_once

    bytes_read, read = [], StoredTensor.read_bytes_into

    def counted(self, out, *, start):
        bytes_read.append(len(out))  # from several threads
        read(self, out, start=start)

    StoredTensor.read_bytes_into = counted

    class Stops(trainer.Watcher):
        def line(self, line):
            if line["step"] == 3 and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    # Over two processes, each holds half of the parameters, and rows that are no neighbours.
    MESH = {"fsdp": 4, "data": 2}

    EVALUATION = {"data": {"evaluation": str(folder / "few.jsonl")}}

    def run(output, watcher=None, **sections):
        place = {"output": str(folder / output), "keep": 9, "mesh": MESH}
        outcome = trainer.Trainer(small_run(folder, run=place, **sections), watcher=watcher).run()
        stopped = outcome.stopped_by and outcome.stopped_by.name
        return {"steps": outcome.steps, "began_at": outcome.began_at, "stopped_by": stopped}

    def misplaced(sizes):
        # What lies on devices of this process and is not the part that their place in a mesh asks for.
        mesh = make_mesh(sizes)
        whole = np.arange(2 * 16 * 6).reshape(2, 16, 6)
        mine = whole[:, held_rows(mesh, 16)]
        placed = place_batch(mesh, Batch(mine, mine + 1, mine.astype(np.float32)))
        parts = whole.size * sizes.get("tensor", 1) // 8
        return [
            str(shard.device)
            for shard in placed.segment_ids.addressable_shards
            if shard.data.size != parts or not np.array_equal(shard.data, whole[shard.index] + 1)
        ]

    with joined(ProcessPlace(address, count, index)):
        assert jax.device_count() == 8 and jax.local_device_count() == 8 // count
        lora = {"lora": {"rank": 3, "alpha": 6.0, "dropout": 0.1}, "optimizer": {"learning_rate": 0.05}}
        if count == 1:
            whole, found = run("one", **EVALUATION), sum(bytes_read)
            print(json.dumps({"bytes": found, "runs": [whole, run("lora-one", **lora)]}))
        else:
            whole, found = run("two", **EVALUATION), sum(bytes_read)
            runs = [
                whole,
                run("stopped", Stops()),
                run("resumed", **EVALUATION),
                run("lora-two", **lora),
                run("orbax-two", model={"source": str(folder / "orbax")}),
            ]
            meshes = [
                {"data": 8},
                {"sequence": 2, "data": 4},
                {"tensor": 2, "fsdp": 4},
                {"fsdp": 2, "sequence": 2, "data": 2},
            ]
            held = [held_rows(make_mesh(sizes), 16).tolist() for sizes in meshes]
            report = {"runs": runs, "bytes": found, "held": held, "misplaced": list(map(misplaced, meshes))}
            print(json.dumps(report), flush=True)
            if index == 1:
                raise TrainingError("the disk of this process is full")
            while True:
                largest(0)
    """
)


@dataclasses.dataclass(frozen=True)
class Started:
    """Processes that have ended.

    Attributes:
        printed: what each has said on standard output, as JSON.
        statuses: with which each has ended.
        errors: what each has said on standard error.
    """

    printed: list[Any]
    statuses: list[int]
    errors: list[str]


def start(folder: Path, *, processes: int) -> Started:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), address, str(processes)]
    started = [
        subprocess.Popen(
            [*command, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for index in range(processes)
    ]
    try:
        ended = [process.communicate(timeout=900) for process in started]
    finally:
        for process in started:
            process.kill()
    objects = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in ended]
    printed = [json.loads(each[0]) if each else None for each in objects]
    return Started(printed, [process.returncode for process in started], [error for _, error in ended])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_model(folder / "model")
    convert(folder / "model", folder / "orbax")
    write_texts(folder / "texts.jsonl")
    write_texts(folder / "few.jsonl", 9)
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> Started:
    """One process, which trains to the end."""
    started = start(folder, processes=1)
    assert started.statuses == [0], started.errors
    return started


@pytest.fixture(scope="module")
def two(folder: Path, one: Started) -> Started:
    """Two, which train to the end, are stopped in another run, and go on with that of one after its second step."""
    shutil.copytree(folder / "one", folder / "resumed")
    for later in ("checkpoints/4", "checkpoints/6", "model"):
        shutil.rmtree(folder / "resumed" / later)
    started = start(folder, processes=2)
    assert None not in started.printed, started.errors
    return started


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in lines(output) if "loss" in line]


def assert_same_run(output: Path, expected: Path) -> None:
    """Every step is told once, and is that of another run; where the end is evaluated, that too."""
    found = lines(output)
    assert [line["step"] for line in found if "loss" in line] == list(range(1, STEPS + 1))
    for line, wanted in zip(found, lines(expected), strict=True):
        times = {name for name in wanted if "second" in name or name == "memory_bytes"}
        assert line.keys() == wanted.keys()
        for name in wanted.keys() - times:
            # The order of sums is another, which shows in gradients before it does in losses.
            close = 1e-4 if name == "gradient_norm" else 1e-5
            assert line[name] == pytest.approx(wanted[name], rel=close), (line["step"], name)


def assert_same_model(folder: Path, expected: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in expected.iterdir())
    found, wanted = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_two_processes_have_the_losses_of_one_and_write_the_same_model(folder: Path, two: Started) -> None:
    assert [printed["runs"][0] for printed in two.printed] == [DONE] * 2
    assert_same_run(folder / "two", folder / "one")
    assert_same_model(folder / "two" / "model", folder / "one" / "model")
    for output in ("one", "two"):
        assert (folder / output / "loss.png").exists()
        assert sorted(path.name for path in (folder / output / "checkpoints").iterdir()) == ["2", "4", "6"]


def test_saved_by_one_process_and_gone_on_with_by_two(folder: Path, two: Started) -> None:
    assert [printed["runs"][2] for printed in two.printed] == [DONE | {"began_at": 2}] * 2
    assert_same_run(folder / "resumed", folder / "one")
    assert_same_model(folder / "resumed" / "model", folder / "one" / "model")


@pytest.mark.usefixtures("compiled_quickly")
def test_a_signal_to_one_of_two_processes_saves_and_one_alone_goes_on(folder: Path, two: Started) -> None:
    assert [printed["runs"][1] for printed in two.printed] == [
        DONE | {"steps": 3, "stopped_by": "SIGTERM"}
    ] * 2
    assert not (folder / "stopped" / "model").exists()
    data = {"evaluation": str(folder / "few.jsonl")}
    run = {"output": str(folder / "stopped"), "keep": 9, "mesh": {"data": 1}}
    outcome = Trainer(small_run(folder, data=data, run=run)).run()
    assert (outcome.began_at, outcome.steps) == (3, STEPS)
    assert_same_run(folder / "stopped", folder / "one")


def test_two_processes_train_the_adapter_of_one(folder: Path, two: Started) -> None:
    assert [printed["runs"][3] for printed in two.printed] == [DONE] * 2
    assert_same_run(folder / "lora-two", folder / "lora-one")
    assert_same_model(folder / "lora-two" / "model", folder / "lora-one" / "model")
    adapters = [
        load_file(folder / name / "adapter" / "adapter_model.safetensors")
        for name in ("lora-two", "lora-one")
    ]
    assert adapters[0].keys() == adapters[1].keys()
    for name, array in adapters[0].items():
        np.testing.assert_allclose(array, adapters[1][name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_each_of_two_processes_reads_only_rows_that_it_holds(one: Started, two: Started) -> None:
    (everything,) = (printed["bytes"] for printed in one.printed)
    assert everything > 100_000
    # Where columns are cut, as they are of most weights here, both read all rows.
    assert all(0.5 * everything < printed["bytes"] < 0.9 * everything for printed in two.printed)


def test_two_processes_read_an_orbax_folder_as_they_do_the_one_that_it_came_from(
    folder: Path, two: Started
) -> None:
    assert [printed["runs"][4] for printed in two.printed] == [DONE] * 2
    found, expected = (
        [line["loss"] for line in lines(folder / name) if "loss" in line] for name in ("orbax-two", "two")
    )
    assert found == expected


def test_every_device_gets_its_rows_and_its_part_of_them_whatever_the_mesh_puts_across_processes(
    two: Started,
) -> None:
    assert [printed["misplaced"] for printed in two.printed] == [[[]] * 4] * 2
    first, second = (printed["held"] for printed in two.printed)
    everything = list(range(16))
    assert first == [everything[:8], everything, everything, [0, 1, 2, 3, 8, 9, 10, 11]]
    assert second == [everything[8:], everything, everything, [4, 5, 6, 7, 12, 13, 14, 15]]


def test_an_error_in_one_process_ends_the_other_too(two: Started) -> None:
    assert two.statuses == [2, 2]
    assert two.errors[1].rstrip().endswith("TrainingError: the disk of this process is full")
    assert "TrainingError: another process has ended, see what it says" in two.errors[0]
