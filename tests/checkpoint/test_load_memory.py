"""Loading and converting need little memory beside the parameters themselves. Measured in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qwen35_jax.checkpoint.safetensors_file import TensorToWrite, make_header, write_safetensors
from qwen35_jax.checkpoint.tensor_table import SPELLINGS, bound_tensors
from qwen35_jax.config import ModelConfig
from tests.checkpoint.tiny_checkpoint import BFLOAT16, MOTIF, text_config

MEASURE = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.orbax import convert_to_orbax, load_orbax

source, task, target = sys.argv[1:]

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

jnp.zeros(1).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
before = kilobytes("VmRSS")
parameters = {}
if task == "convert":
    convert_to_orbax(source, target)
elif task == "restore":
    _, parameters, _ = load_orbax(target)
else:
    _, parameters, _ = load_hf(source, parameter_dtype=None if task == "as stored" else task)
jax.block_until_ready(parameters)
peak = kilobytes("VmHWM") - before
print(json.dumps({"peak": peak * 1024, "held": sum(x.nbytes for x in jax.tree.leaves(parameters))}))
"""


def write_large(folder: Path, *, repeats: int, embed: int, mlp: int, vocab: int) -> tuple[int, int]:
    """A bfloat16 checkpoint. Returns its bytes and those of its largest stacked parameter."""
    config = text_config(
        layer_types=MOTIF * repeats,
        hidden_size=embed,
        intermediate_size=mlp,
        vocab_size=vocab,
        linear_value_head_dim=64,
        mtp_num_hidden_layers=0,
        tie_word_embeddings=True,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    block = np.arange(1 << 22, dtype=np.uint16) % 0x80 + 0x3F00

    def values(shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(block, shape).view(BFLOAT16)

    bound = list(bound_tensors(ModelConfig.from_hf(config), SPELLINGS[2], mtp=False, lm_head=False))
    tensors = [TensorToWrite(t.name, BFLOAT16, t.shape, lambda shape=t.shape: values(shape)) for t in bound]
    header = make_header(tensors, {"format": "pt"})
    write_safetensors(folder / "model.safetensors", tensors, header, advance=lambda count: None)
    largest = max((t.repeats or 1) * 2 * int(np.prod(part.shape)) for t in bound for part in t.parts)
    return sum(tensor.nbytes for tensor in tensors), largest


def measure(source: Path, task: str, target: Path = Path()) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURE, str(source), task, str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@dataclasses.dataclass(frozen=True)
class Large:
    """A checkpoint, its bytes, and those of its largest stacked parameter."""

    folder: Path
    nbytes: int
    largest: int

    def check(self, found: dict[str, int], *, held: int, more: int) -> None:
        """What is held at the end is exactly as expected, and what more was in use on the way at most so much."""
        extra = found["peak"] - found["held"]
        print(f"{found['held'] / 1e6:.0f} MB held, {extra / 1e6:.0f} MB more at the peak")
        assert found["held"] == held
        assert extra <= more + SLACK


SLACK = 40 << 20
"""Buffers, indices, and what the allocator keeps."""
SIZES = {
    "small": {"repeats": 5, "embed": 640, "mlp": 1280, "vocab": 12_000},
    "a gigabyte": {"repeats": 4, "embed": 1536, "mlp": 6144, "vocab": 48_000},
}


@pytest.fixture(scope="module", params=["small", pytest.param("a gigabyte", marks=pytest.mark.extended)])
def large(request, tmp_path_factory) -> Iterator[Large]:
    folder = tmp_path_factory.mktemp("large") / "source"
    nbytes, largest = write_large(folder, **SIZES[request.param])
    assert (nbytes > 1e9) == (request.param == "a gigabyte")
    yield Large(folder, nbytes, largest)
    shutil.rmtree(folder.parent)  # pytest would keep it, and that of the next two runs


@pytest.fixture(scope="module")
def converted(large: Large) -> tuple[Path, dict[str, int]]:
    """An Orbax folder, and what making it took."""
    target = large.folder.with_name("target")
    return target, measure(large.folder, "convert", target)


def test_b57_loading_needs_the_parameters_and_about_one_more(large: Large) -> None:
    found = measure(large.folder, "as stored")
    large.check(found, held=large.nbytes, more=large.largest)


def test_b57_loading_in_another_dtype_needs_the_parameters_and_about_one_more(large: Large) -> None:
    found = measure(large.folder, "float32")
    large.check(found, held=2 * large.nbytes, more=2 * large.largest)


def test_b57_conversion_needs_about_one_parameter(
    large: Large, converted: tuple[Path, dict[str, int]]
) -> None:
    large.check(converted[1], held=0, more=large.largest)


def test_b57_loading_an_orbax_folder_needs_the_parameters_and_about_two_more(
    large: Large, converted: tuple[Path, dict[str, int]]
) -> None:
    # Orbax copies what it has read once more.
    found = measure(large.folder, "restore", converted[0])
    large.check(found, held=large.nbytes, more=2 * large.largest + (64 << 20))
