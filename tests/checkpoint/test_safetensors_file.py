"""The strict reader: well-formed files read the same as with the safetensors library, malformed ones are refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from qwen35_jax.checkpoint.safetensors_file import (
    DTYPES,
    TensorToWrite,
    make_header,
    open_safetensors,
    write_safetensors,
)
from qwen35_jax.errors import CheckpointError


def file_with(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with this header (an object, or raw text or bytes), and any claimed header length."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ONE = b"\0" * 8
MALFORMED = {
    "header longer than the file": ({"a": entry()}, ONE, 1 << 20),
    "header length near 2^64": ({"a": entry()}, ONE, (1 << 64) - 1),
    "not JSON": ('{"a": ', ONE, None),
    "not an object": ("[1, 2]", ONE, None),
    "not text": (b"{\xff\xfe}", ONE, None),
    "nested too deep": ('{"a":' * 100_000, ONE, None),
    "a number that is not JSON": (
        '{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
        ONE,
        None,
    ),
    "reversed offsets": ({"a": entry(offsets=(8, 0))}, ONE, None),
    "negative offset": ({"a": entry(offsets=(-8, 0))}, ONE, None),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, ONE + b"\0" * 4, None),
    "two names for the same bytes": ({"a": entry(), "b": entry()}, ONE, None),
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20, None),
    "first tensor does not start at 0": ({"a": entry(offsets=(4, 12))}, b"\0" * 12, None),
    "shape larger than the span": ({"a": entry(shape=(3,))}, ONE, None),
    "shape smaller than the span": ({"a": entry(shape=(1,))}, ONE, None),
    "shape product overflows": ({"a": entry(shape=(1 << 62, 4))}, ONE, None),
    "product overflows to the span": ({"a": entry(shape=((1 << 62) + 2,), offsets=(0, 8))}, ONE, None),
    "overflow hidden behind a zero": ({"a": entry(shape=(1 << 62, 1 << 62, 0), offsets=(0, 0))}, b"", None),
    "unknown dtype": ({"a": entry(dtype="F128")}, ONE, None),
    "dtype that is no text": ({"a": entry(dtype=["F32"])}, ONE, None),
    "fractional size": ({"a": entry(shape=(2.0,))}, ONE, None),
    "boolean size": ({"a": entry(shape=(True, 2))}, ONE, None),
    "shape that is no list": ({"a": entry(shape="2")}, ONE, None),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, ONE, None),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, ONE, None),
    "additional field": ({"a": {**entry(), "stride": [1]}}, ONE, None),
    "tensor given twice": (f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}', ONE, None),
    "field given twice": ('{"a": {"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', ONE, None),
    "bytes after the last tensor": ({"a": entry()}, ONE + b"\0", None),
    "bytes without a tensor": ({}, b"\0", None),
    "one byte short": ({"a": entry()}, ONE[:-1], None),
    "name that cannot be printed": (
        '{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        ONE,
        None,
    ),
    "number of thousands of digits": (
        f'{{"a": {{"dtype":"F32","shape":[{"9" * 5000}],"data_offsets":[0,8]}}}}',
        ONE,
        None,
    ),
    "metadata that is no text": ({"__metadata__": {"step": 3}, "a": entry()}, ONE, None),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_b56_malformed_file_is_refused_naming_the_file(tmp_path: Path, case: str) -> None:
    header, data, length = MALFORMED[case]
    path = file_with(tmp_path / "bad.safetensors", header, data, length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        open_safetensors(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Python objects made from a header are larger than its text; what must not happen is to believe a size in it.
    assert peak < 200_000 + 40 * path.stat().st_size


@pytest.mark.parametrize("size", range(9))
def test_b56_file_shorter_than_any_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"\1" * size)
    with pytest.raises(CheckpointError, match=r"short\.safetensors"):
        open_safetensors(path)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.safetensors: cannot be read"):
        open_safetensors(tmp_path / "absent.safetensors")


def test_every_float_type_reads_as_the_library_wrote_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wanted = {
        name: rng.integers(0, 127, size=(3, dtype.itemsize * 5), dtype=np.uint8).view(dtype)
        for name, dtype in DTYPES.items()
        if name not in ("BOOL", "C64", "F8_E8M0")
    }
    wanted["scalar"] = np.array(1.5, np.float32)
    wanted["empty"] = np.zeros((0, 4), np.float32)
    safetensors.numpy.save_file(wanted, tmp_path / "all.safetensors", metadata={"format": "pt"})
    file = open_safetensors(tmp_path / "all.safetensors")
    assert dict(file.metadata) == {"format": "pt"}
    assert file.tensors.keys() == wanted.keys()
    for name, tensor in file.tensors.items():
        assert tensor.dtype == wanted[name].dtype
        assert tensor.read().tobytes() == wanted[name].tobytes(), name


def test_library_reads_what_is_written_here(tmp_path: Path) -> None:
    values = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([1.0, -2.5], ml_dtypes.bfloat16),
        "ü": np.zeros((0, 3), np.int8),
    }
    tensors = [TensorToWrite(name, x.dtype, x.shape, lambda x=x: x) for name, x in values.items()]
    path = tmp_path / "out.safetensors"
    counted: list[int] = []
    write_safetensors(path, tensors, make_header(tensors, {"format": "pt"}), advance=counted.append)
    found = safetensors.numpy.load_file(path)
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], values[name]) for name in values)
    assert sum(counted) == sum(x.nbytes for x in values.values())
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_values_that_are_not_as_announced_are_not_written(tmp_path: Path) -> None:
    tensor = TensorToWrite("a", np.dtype(np.float32), (2,), lambda: np.zeros(2, np.float16))
    with pytest.raises(CheckpointError, match="'a': dtype float16, announced as float32"):
        write_safetensors(
            tmp_path / "x.safetensors", [tensor], make_header([tensor], {}), advance=lambda count: None
        )


def test_file_that_shrinks_after_the_check_raises_instead_of_returning_garbage(tmp_path: Path) -> None:
    path = file_with(tmp_path / "a.safetensors", {"a": entry()}, ONE)
    (tensor,) = open_safetensors(path).tensors.values()
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="ended inside tensor 'a'"):
        tensor.read()
