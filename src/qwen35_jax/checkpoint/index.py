"""The weight files of a Hugging Face folder: one file, or shards with an index.

The index is an allow-list: it names every tensor and the shard that holds it, and the shards must hold
exactly these. Shard names are checked before any file is opened, since an index may name any path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from qwen35_jax.checkpoint.links import check_stays_inside
from qwen35_jax.checkpoint.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors
from qwen35_jax.config.json_file import parse_json, read_json_text
from qwen35_jax.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The checked weight files of a folder.

    Attributes:
        folder: where they lie.
        files: by name relative to the folder, in the order of their names.
        index: text of the index file, None where there is one weight file only.
    """

    folder: Path
    files: Mapping[str, SafetensorsFile]
    index: str | None

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for file in self.files.values() for tensor in file.tensors.values()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a weight file or an index under the names that Hugging Face uses."""
    return (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()


def open_weight_files(folder: Path) -> WeightFiles:
    """Find, open and check a folder's weight files.

    Raises:
        CheckpointError: no weights, both layouts at once, a malformed index or file, a shard that is missing
            or lies outside the folder, a tensor that is in another shard than the index says, in two, or not
            in the index.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    for path in (single, index):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path}: is a link to a file that is not there; download the folder again")
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}; which one is meant? Remove the stale one"
        )
    if single.exists():
        return WeightFiles(folder, {SINGLE_FILE: open_safetensors(_inside(folder, SINGLE_FILE))}, None)
    if not index.exists():
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".gguf", ".safetensors")
        )
        found = f"; found {', '.join(others[:4])}, which this program does not read" if others else ""
        raise CheckpointError(
            f"{folder}: no weights: expected {SINGLE_FILE}, or shards with {INDEX_FILE}{found}"
        )
    return _open_shards(folder, index)


def check_shard_name(name: object, *, listed_in: Path) -> str:
    """The name of a weight file as another file lists it, which may be any text.

    Raises:
        CheckpointError: it is not that of a .safetensors file inside the folder.
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{listed_in}: a shard is named {name!r}, expected a file name")
    path = PurePosixPath(name)
    if "\\" in name or not name.isprintable() or path.is_absolute() or ".." in path.parts or len(name) > 255:
        raise CheckpointError(
            f"{listed_in}: shard '{name[:80]}' does not name a file inside the folder; refused"
        )
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{listed_in}: shard '{name}' is not a .safetensors file; refused")
    return name


def _inside(folder: Path, name: object) -> Path:
    """The path of a shard, after making sure without opening anything that it lies in the folder."""
    path = folder / check_shard_name(name, listed_in=folder / INDEX_FILE)
    check_stays_inside(folder, path)
    return path


def _open_shards(folder: Path, index: Path) -> WeightFiles:
    try:
        text = read_json_text(index)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index}: cannot be read: {error}") from error
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{index}: {error}; download or write the file again") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map object that names the shard of every tensor")
    paths = {}
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard not in paths:
            paths[shard] = _inside(folder, shard)
    for shard, path in paths.items():
        if not path.is_file():
            tensor = next(name for name, file in weight_map.items() if file == shard)
            raise CheckpointError(
                f"{path}: is missing, but {INDEX_FILE} names it for '{tensor}' and others;"
                " download the folder again"
            )
    files = {shard: open_safetensors(paths[shard]) for shard in sorted(paths)}
    for complaint in _disagreements(weight_map, files):
        raise CheckpointError(complaint)
    return WeightFiles(folder, files, text)


def _disagreements(weight_map: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> Iterator[str]:
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            yield f"{files[shard].path}: does not hold tensor '{name}', which {INDEX_FILE} places there"
    for shard, file in files.items():
        for name in file.tensors:
            if name not in weight_map:
                yield f"{file.path}: holds tensor '{name}', which {INDEX_FILE} does not name"
            elif weight_map[name] != shard:
                yield f"{file.path}: holds tensor '{name}', which {INDEX_FILE} places in {weight_map[name]}"
