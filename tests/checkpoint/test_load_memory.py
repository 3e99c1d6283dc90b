"""Loading and converting need little memory beside the parameters themselves. Measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
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
    block = np.random.default_rng(0).integers(0x3F00, 0x3F80, size=1 << 22, dtype=np.uint16)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(block, shape).view(BFLOAT16)

    bound = list(bound_tensors(ModelConfig.from_hf(config), SPELLINGS[2], mtp=False, lm_head=False))
    tensors = [TensorToWrite(t.name, BFLOAT16, t.shape, lambda shape=t.shape: values(shape)) for t in bound]
    header = make_header(tensors, {"format": "pt"})
    write_safetensors(folder / "model.safetensors", tensors, header, advance=lambda count: None)
    largest = max((t.repeats or 1) * 2 * int(np.prod(part.shape)) for t in bound for part in t.parts)
    return sum(tensor.nbytes for tensor in tensors), largest


def measure(source: Path, task: str, target: Path) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURE, str(source), task, str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def check(tmp_path: Path, slack: int, **sizes: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    nbytes, largest = write_large(source, **sizes)
    print(f"checkpoint {nbytes / 1e6:.0f} MB, largest stacked parameter {largest / 1e6:.0f} MB")
    # What is held at the end, and how much more may be in use on the way. Orbax copies what it has read once more.
    expected = {
        "as stored": (nbytes, largest),
        "float32": (2 * nbytes, 2 * largest),
        "convert": (0, largest),
        "restore": (nbytes, 2 * largest + (64 << 20)),
    }
    for task, (held, bound) in expected.items():
        found = measure(source, task, target)
        extra = found["peak"] - found["held"]
        print(f"{task}: {found['held'] / 1e6:.0f} MB held, {extra / 1e6:.0f} MB more at the peak")
        assert found["held"] == held
        assert extra <= bound + slack, (task, extra, bound)


def test_b57_peak_memory_is_the_parameters_and_about_one_more(tmp_path: Path) -> None:
    check(tmp_path, 40 << 20, repeats=5, embed=640, mlp=1280, vocab=12_000)


@pytest.mark.slow
def test_b57_peak_memory_of_a_checkpoint_of_more_than_a_gigabyte(tmp_path: Path) -> None:
    check(tmp_path, 80 << 20, repeats=6, embed=1536, mlp=6144, vocab=96_000)
