"""Parameters filled tensor by tensor from the files, with little more than themselves in memory.

The tensors that share stacked parameters (one rule of the table, all layers) form a family. A family's
parameters are allocated once, every tensor is read straight to its place in them, and they are handed to JAX,
which on a CPU takes over the memory without a copy. Only where values must be rearranged or cast does a
tensor (or a piece of one) pass through a buffer. Each byte of a file is read at most once, also when
parameters are cut over several devices; of several processes each reads the rows of which it holds a part, and
the whole of a tensor whose values must be rearranged.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from qwen35_jax.checkpoint.parameter_tree import LazyParameter, ParameterPath, leaf, set_leaf
from qwen35_jax.checkpoint.placement import check_shardings
from qwen35_jax.checkpoint.progress import Advance
from qwen35_jax.checkpoint.safetensors_file import PARAMETER_DTYPES, StoredTensor
from qwen35_jax.checkpoint.tensor_table import NEVER_NARROWED, BoundPart, BoundTensor, bound_shapes
from qwen35_jax.errors import CheckpointError

_PIECE = 16 << 20
_ALIGNMENT = 64  # bytes; XLA's CPU client takes over host memory that is aligned so, and copies any other
_THREADS = min(4, os.cpu_count() or 1)


def read_parameters(
    bound: Iterable[BoundTensor],
    stored: Mapping[str, StoredTensor],
    *,
    parameter_dtype: DTypeLike | None = None,
    shardings: Any = None,
    to_device: bool = True,
    advance: Advance,
) -> dict[str, Any]:
    """The nested parameter dictionary, read from a checkpoint whose names and shapes have been checked.

    Args:
        bound: the table's rows for the model.
        stored: where each of their tensors lies.
        parameter_dtype: dtype to cast to; None keeps the file's. Parameters in `NEVER_NARROWED` are only ever
            widened.
        shardings: nested dictionary like the result, of `jax.sharding.Sharding`; None puts all on one device.
        to_device: False leaves NumPy arrays. On a device, float64 becomes float32 unless JAX's 64-bit types
            are on.
        advance: told of the bytes of every tensor or piece of one.

    Raises:
        CheckpointError: shardings that are not those of these parameters, before anything is read; a data type that
            no parameter may have; a file that changed since its header was checked.
    """
    bound = list(bound)
    check_shardings(shardings, bound_shapes(bound), to_device=to_device)
    families = [(tensors, _dtype_in_file(tensors, stored)) for tensors in _families(bound)]
    parameters: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for batch in _batches(families, stored):
            filled: list[tuple[ParameterPath, _Shards]] = []
            jobs: list[Callable[[], int]] = []
            for tensors, in_file in batch:
                shards = []
                for part in tensors[0].parts:
                    dtype = dtype_in_memory(part.path, in_file, parameter_dtype)
                    if to_device:
                        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
                    sharding = None if shardings is None else leaf(shardings, part.path)
                    shards.append(_allocate(tensors[0], part, dtype, sharding))
                    filled.append((part.path, shards[-1]))
                jobs += [job for tensor in tensors for job in _jobs(tensor, stored[tensor.name], shards)]
            for nbytes in pool.map(lambda job: job(), jobs):
                advance(nbytes)
            for path, pieces in filled:
                set_leaf(parameters, path, pieces.place() if to_device else pieces.whole())
    return parameters


def lazy_parameters(bound: Iterable[BoundTensor], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The nested parameter dictionary with a `LazyParameter` at every leaf, for a conversion that streams."""
    parameters: dict[str, Any] = {}
    for family in _families(bound):
        dtype = _dtype_in_file(family, stored)
        for index, part in enumerate(family[0].parts):
            tensors = [dataclasses.replace(tensor, parts=(tensor.parts[index],)) for tensor in family]
            shards = functools.partial(_allocate, tensors[0], part, dtype, None)

            def read(
                tensors: list[BoundTensor] = tensors, allocate: Callable[[], _Shards] = shards
            ) -> np.ndarray:
                parameter = allocate()
                jobs = [job for tensor in tensors for job in _jobs(tensor, stored[tensor.name], [parameter])]
                with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                    list(pool.map(lambda job: job(), jobs))
                return parameter.whole()

            stack = () if tensors[0].repeats is None else (tensors[0].repeats,)
            set_leaf(parameters, part.path, LazyParameter((*stack, *part.shape), dtype, read))
    return parameters


def _families(bound: Iterable[BoundTensor]) -> Iterable[list[BoundTensor]]:
    """The tensors grouped by the parameters that they fill together."""
    families: dict[tuple[ParameterPath, ...], list[BoundTensor]] = {}
    for tensor in bound:
        families.setdefault(tuple(part.path for part in tensor.parts), []).append(tensor)
    return families.values()


def _batches(
    families: Sequence[tuple[list[BoundTensor], np.dtype]], stored: Mapping[str, StoredTensor]
) -> Iterator[list[tuple[list[BoundTensor], np.dtype]]]:
    """Families enough to keep the threads busy, and few enough to be in host memory at once."""
    batch: list[tuple[list[BoundTensor], np.dtype]] = []
    nbytes = 0
    for tensors, in_file in families:
        batch.append((tensors, in_file))
        nbytes += sum(stored[tensor.name].nbytes for tensor in tensors)
        if nbytes >= _THREADS * _PIECE:
            yield batch
            batch, nbytes = [], 0
    yield batch


def dtype_in_memory(path: ParameterPath, file_dtype: np.dtype, parameter_dtype: DTypeLike | None) -> np.dtype:
    """Data type that a parameter of a file gets: `parameter_dtype`, or the file's; see `NEVER_NARROWED`."""
    if parameter_dtype is None:
        return file_dtype
    if path[-1] in NEVER_NARROWED:
        return np.dtype(jnp.promote_types(file_dtype, parameter_dtype))
    return np.dtype(parameter_dtype)


def _dtype_in_file(tensors: Sequence[BoundTensor], stored: Mapping[str, StoredTensor]) -> np.dtype:
    """Data type that holds every layer's value exactly; one layer may store another than the next."""
    in_file = stored[tensors[0].name].dtype
    for tensor in tensors:
        found = stored[tensor.name].dtype
        if found not in PARAMETER_DTYPES:
            raise CheckpointError(
                f"{stored[tensor.name].file}: tensor '{tensor.name}' is {found}; parameters must be"
                " float16, bfloat16, float32 or float64 (quantized checkpoints are not supported)"
            )
        in_file = np.dtype(jnp.promote_types(in_file, found))
    return in_file


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised host memory that JAX on a CPU can take over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Memory for one box of a parameter, from `starts` to `stops`; the first axis counts the repeats."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    memory: np.ndarray

    def holds(self, repeat: int, start: int, stop: int) -> bool:
        """Whether any of rows `start` to `stop` of this repeat lie in the box."""
        in_stack = self.starts[0] <= repeat < self.stops[0]
        return in_stack and self.starts[1] < stop and start < self.stops[1]

    def fill(self, repeat: int, start: int, rows: np.ndarray) -> None:
        """Take what belongs here out of `rows`, which are those of this repeat from row `start` on."""
        low, high = max(start, self.starts[1]), min(start + len(rows), self.stops[1])
        rest = tuple(slice(a, b) for a, b in zip(self.starts[2:], self.stops[2:], strict=True))
        target = self.memory[repeat - self.starts[0], low - self.starts[1] : high - self.starts[1]]
        np.copyto(target, rows[(slice(low - start, high - start), *rest)], casting="unsafe")


@dataclasses.dataclass(frozen=True)
class _Shards:
    """All boxes of one parameter that this process holds."""

    shape: tuple[int, ...]
    stacked: bool
    sharding: jax.sharding.Sharding | None
    boxes: Mapping[tuple[tuple[int, int], ...], _Shard]

    def whole(self) -> np.ndarray:
        """The one box of a parameter that is not cut."""
        (shard,) = self.boxes.values()
        return shard.memory if self.stacked else shard.memory[0]

    def place(self) -> jax.Array:
        if self.sharding is None:
            return jax.device_put(self.whole())

        def box(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # only asked for devices of this process
            memory = self.boxes[_bounds(index, self.shape)].memory
            return memory if self.stacked else memory[0]

        return jax.make_array_from_callback(self.shape, self.sharding, box)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip(index, shape, strict=True)
    )


def _allocate(
    tensor: BoundTensor, part: BoundPart, dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> _Shards:
    stacked = tensor.repeats is not None
    shape = (tensor.repeats, *part.shape) if tensor.repeats is not None else part.shape
    if sharding is None:
        indices = [tuple(slice(None) for _ in shape)]
    else:
        indices = list(sharding.addressable_devices_indices_map(shape).values())
    boxes = {}
    for bounds in {_bounds(index, shape) for index in indices if index is not None}:
        full = bounds if stacked else ((0, 1), *bounds)
        starts, stops = (tuple(bound[end] for bound in full) for end in (0, 1))
        memory = aligned_empty([stop - start for start, stop in full], dtype)
        boxes[bounds] = _Shard(starts, stops, memory)
    return _Shards(shape, stacked, sharding, boxes)


def _jobs(
    tensor: BoundTensor, stored: StoredTensor, shards: Sequence[_Shards]
) -> Iterator[Callable[[], int]]:
    """What has to be read for one tensor, as work that threads can share; each piece returns its bytes."""
    repeat = tensor.repeat or 0
    targets = [list(part_shards.boxes.values()) for part_shards in shards]
    if not tensor.grouped and all(part.keeps_order for part in tensor.parts):
        for part, boxes in zip(tensor.parts, targets, strict=True):
            yield from _piecewise(stored, part, boxes, repeat)
        return

    def rearrange() -> int:
        whole = stored.read()
        for part, boxes in zip(tensor.parts, targets, strict=True):
            rows = tensor.part_view(whole, part)
            for box in boxes:
                if box.holds(repeat, 0, len(rows)):
                    box.fill(repeat, 0, rows)
        return stored.nbytes

    yield rearrange


def _piecewise(
    stored: StoredTensor, part: BoundPart, boxes: Sequence[_Shard], repeat: int
) -> Iterator[Callable[[], int]]:
    """Pieces of whole rows of the parameter, whose bytes lie in the file in the parameter's order."""
    bytes_per_file_row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    offset = part.start * bytes_per_file_row
    rows = part.shape[0]
    row_shape = part.shape[1:]
    row_bytes = math.prod(row_shape) * stored.dtype.itemsize
    step = max(1, _PIECE // max(1, row_bytes))

    def read_piece(start: int, stop: int) -> int:
        nbytes = (stop - start) * row_bytes
        holding = [box for box in boxes if box.holds(repeat, start, stop)]
        if not holding:
            return nbytes
        # Rows before and after all boxes belong to other processes.
        start = max(start, min(box.starts[1] for box in holding))
        stop = min(stop, max(box.stops[1] for box in holding))
        first = holding[0]
        direct = (
            len(holding) == 1
            and first.memory.dtype == stored.dtype
            and first.memory.shape[2:] == row_shape
            and first.starts[1] <= start
            and stop <= first.stops[1]
        )
        if direct:
            place = first.memory[repeat - first.starts[0], start - first.starts[1] : stop - first.starts[1]]
            stored.read_bytes_into(place.reshape(-1).view(np.uint8), start=offset + start * row_bytes)
            return nbytes
        buffer = np.empty((stop - start, *row_shape), stored.dtype)
        stored.read_bytes_into(buffer.reshape(-1).view(np.uint8), start=offset + start * row_bytes)
        for box in holding:
            box.fill(repeat, start, buffer)
        return nbytes

    for start in range(0, rows, step):
        yield lambda start=start: read_piece(start, min(start + step, rows))
