"""A strict reader and writer of single safetensors files.

A weight file comes from the network, so nothing in it is believed before it is checked: the header's length,
its JSON (duplicate keys included), every data type, and that the tensors tile the data section exactly, with
no overlap, no gap and nothing after them. Data is read with `pread` straight into memory that the caller
owns, so that a file that shrinks while it is read raises an error where a memory map would kill the process.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the data).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from qwen35_jax.checkpoint.progress import Advance
from qwen35_jax.config.json_file import parse_json
from qwen35_jax.errors import CheckpointError

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
"""The data types of the format that NumPy can hold byte for byte, by the name used in the header."""

PARAMETER_DTYPES = tuple(DTYPES[name] for name in ("F16", "BF16", "F32", "F64"))
"""Those of them that a parameter may have; all others store quantized numbers or none of a model."""

DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER = 100_000_000  # the bound of the format's reference implementation
_MAX_READ = 1 << 30  # Linux moves at most 2 GiB in one read call


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: where its bytes lie. Holds no data and no open file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Position of the first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The tensor as a new array in the file's own data type."""
        out = np.empty(self.shape, self.dtype)
        self.read_bytes_into(out.reshape(-1).view(np.uint8), start=0)
        return out

    def read_bytes_into(self, out: np.ndarray, *, start: int) -> None:
        """Fill the flat uint8 array `out` with the tensor's bytes from byte `start` on.

        Raises:
            CheckpointError: the file is gone, unreadable or shorter than when its header was checked.
        """
        view = memoryview(out)  # pyright: ignore[reportArgumentType]
        done = 0
        try:
            handle = os.open(self.file, os.O_RDONLY)
            try:
                while done < len(view):
                    piece = view[done : done + _MAX_READ]
                    count = os.preadv(handle, [piece], self.offset + start + done)
                    if count == 0:
                        raise CheckpointError(
                            f"{self.file}: ended inside tensor '{self.name}';"
                            " the file changed while it was read"
                        )
                    done += count
            finally:
                os.close(handle)
        except OSError as error:
            raise CheckpointError(
                f"{self.file}: cannot read tensor '{self.name}': {error.strerror}"
            ) from error


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """A checked file: its tensors in the order of the data, and its header, parsed and as text."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    header: str


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read and check a file's header.

    Raises:
        CheckpointError: names the file, the tensor, what was found and what was expected.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never end
            raise CheckpointError(f"{path}: cannot be read: it is not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path}: has {size} bytes, too few for a safetensors file; download it again"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: claims a header of {length} bytes, but {size - 8} bytes follow"
                    f" (at most {_MAX_HEADER} are allowed); it is truncated or not a safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: the header is not UTF-8 text; it is not a safetensors file"
        ) from error
    tensors, metadata = parse_header(path, header, data_start=8 + length)
    _check_tiling(path, tensors, start=8 + length, size=size)
    return SafetensorsFile(path, {tensor.name: tensor for tensor in tensors}, metadata, header)


def parse_header(path: Path, header: str, *, data_start: int) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a header in the order of their data, and its `__metadata__`.

    Raises:
        CheckpointError: the header is malformed in itself; whether it fits the file is checked elsewhere.
    """
    if not header.startswith("{"):
        raise CheckpointError(f"{path}: the header does not start with '{{'; it is not a safetensors file")
    try:
        parsed = parse_json(header)  # an object, since it starts with a brace
    except ValueError as error:
        raise CheckpointError(f"{path}: the header: {error}; download or write the file again") from None
    metadata = _checked_metadata(path, parsed.pop("__metadata__", {}))
    tensors = [_checked_tensor(path, name, entry, data_start=data_start) for name, entry in parsed.items()]
    return sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)), metadata


def _checked_metadata(path: Path, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must be an object of strings; the file is malformed")
    return metadata


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _checked_tensor(path: Path, name: str, entry: object, *, data_start: int) -> StoredTensor:
    where = f"{path}: tensor '{name}'"
    if not name.isprintable():
        raise CheckpointError(f"{where}: has a name that cannot be printed; the file is malformed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: must have exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not two positions")
    begin, end = offsets
    itemsize = DTYPES[dtype].itemsize
    if math.prod(size for size in shape if size) * itemsize >= 1 << 63:
        raise CheckpointError(f"{where}: shape {shape} of {dtype} is larger than any file")
    expected = math.prod(shape) * itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{where}: data_offsets span {end - begin} bytes, but shape {shape} of {dtype} needs {expected}"
        )
    return StoredTensor(name, DTYPES[dtype], tuple(shape), path, data_start + begin)


def _check_tiling(path: Path, tensors: list[StoredTensor], *, start: int, size: int) -> None:
    """The sorted tensors must follow each other without overlap or gap up to the end of the file."""
    position = start
    for tensor in tensors:
        if tensor.offset < position:
            raise CheckpointError(
                f"{path}: tensor '{tensor.name}' overlaps the one before it; the file is malformed"
            )
        if tensor.offset > position:
            raise CheckpointError(
                f"{path}: {tensor.offset - position} bytes before tensor '{tensor.name}' belong to no tensor"
            )
        position = tensor.offset + tensor.nbytes
    if position > size:
        last = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > size)
        raise CheckpointError(
            f"{path}: is truncated: it has {size} bytes, its tensors need {position}"
            f" (the first one cut off is '{last.name}'); download it again"
        )
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to no tensor")


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """Name, data type and shape of a tensor to be written, and how to get its values when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def make_header(tensors: Iterable[TensorToWrite], metadata: Mapping[str, str]) -> str:
    """The JSON header for tensors stored in this order, padded so that the data starts 8-byte aligned."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"tensor '{tensor.name}': dtype {tensor.dtype} cannot be stored in safetensors"
            )
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % 8)


def write_safetensors(
    path: Path,
    tensors: Iterable[TensorToWrite],
    header: str,
    *,
    advance: Advance,
) -> None:
    """Write one file, tensor by tensor, in the order that `header` was made for.

    Raises:
        CheckpointError: values that do not have the announced dtype and shape.
        OSError: the disk is full or not writable.
    """
    raw = header.encode()
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(raw)))
        file.write(raw)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.values()).reshape(tensor.shape)
            if values.dtype != tensor.dtype:
                raise CheckpointError(
                    f"tensor '{tensor.name}': dtype {values.dtype}, announced as {tensor.dtype}"
                )
            file.write(values.reshape(-1).view(np.uint8).data)
            advance(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
