"""Loading a checkpoint in Hugging Face layout: `config.json` and safetensors files in one folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from qwen35_jax.checkpoint.index import open_weight_files
from qwen35_jax.checkpoint.progress import Progress, quiet
from qwen35_jax.checkpoint.regrouping import with_unrolled_layers
from qwen35_jax.checkpoint.safetensors_file import StoredTensor
from qwen35_jax.checkpoint.streaming import read_parameters
from qwen35_jax.checkpoint.tensor_table import KEPT_PREFIXES, BoundTensor, bound_tensors
from qwen35_jax.config import ModelConfig, require_dense_text
from qwen35_jax.errors import CheckpointError
from qwen35_jax.spec.tensor_rules import SPELLINGS, Spelling, default_spelling

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SourceLayout:
    """What an export needs to write the same files again.

    Attributes:
        config: text of `config.json`.
        headers: text of every weight file's header, by file name.
        index: text of the index file, None for a single file.
    """

    config: str
    headers: Mapping[str, str]
    index: str | None


@dataclasses.dataclass(frozen=True)
class KeptTensors:
    """What the model does not use of a checkpoint, so that an export can write it back.

    Attributes:
        layout: names, shapes, data types and places of all tensors of the source, also of those that were
            loaded.
        tensors: the tensors that no parameter was made from (vision tower, MTP head). They stay in their
            files, which must remain in place until the export.
    """

    layout: SourceLayout
    tensors: Mapping[str, StoredTensor]


def load_hf(
    folder: str | Path,
    *,
    parameter_dtype: DTypeLike | None = None,
    mtp: bool = False,
    unroll_layers: bool = False,
    shardings: Any = None,
    to_device: bool = True,
    progress: Progress = quiet,
) -> tuple[ModelConfig, dict[str, Any], KeptTensors]:
    """Load the text model of a folder in Hugging Face layout.

    Every tensor of the files is accounted for before any is read: missing, mis-shaped and unknown ones are
    refused.

    Args:
        folder: holds `config.json` and the weight files.
        parameter_dtype: dtype to cast parameters to; None keeps the file's. `A_log`, `dt_bias` and the
            DeltaNet norm are never narrowed.
        mtp: load the multi-token-prediction head too, as `parameters["mtp"]`; otherwise its tensors are kept.
        unroll_layers: keep each layer's parameters apart instead of stacked; see `TextConfig.unroll_layers`.
        shardings: nested dictionary like the parameters, of `jax.sharding.Sharding`, to place each straight
            onto its devices; None puts all on the default device.
        to_device: False leaves the parameters as NumPy arrays, float64 included.
        progress: shows how far the reading is.

    Returns:
        The configuration (with `mtp_num_hidden_layers` 0 where the file announces a head that it does not
        hold), the nested parameter dictionary, and what the model does not use.

    Raises:
        ConfigError: `config.json` is missing or wrong, or describes a model that cannot be built.
        CheckpointError: the weights are missing, malformed, or not what the config asks for; shardings that are
            not those of these parameters.
    """
    checkpoint = open_hf(folder, mtp=mtp, unroll_layers=unroll_layers)
    with progress(f"Loading {Path(folder).name}", checkpoint.nbytes) as advance:
        parameters = read_parameters(
            checkpoint.bound,
            checkpoint.stored,
            parameter_dtype=parameter_dtype,
            shardings=shardings,
            to_device=to_device,
            advance=advance,
        )
    return checkpoint.config, parameters, checkpoint.kept


@dataclasses.dataclass(frozen=True)
class HFCheckpoint:
    """A folder whose files fit its configuration, with nothing read but the headers.

    Attributes:
        config: see `load_hf`.
        stored: where each tensor lies.
        bound: the table's rows for the tensors that hold parameters.
        kept: the other tensors, and the layout.
    """

    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    bound: list[BoundTensor]
    kept: KeptTensors

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that hold parameters."""
        return sum(self.stored[tensor.name].nbytes for tensor in self.bound)


def open_hf(folder: str | Path, *, mtp: bool, unroll_layers: bool = False) -> HFCheckpoint:
    """Check everything about a folder that can be checked without reading (but a tied head is compared).

    Arguments and errors as for `load_hf`.
    """
    folder = Path(folder)
    config = ModelConfig.from_hf(folder)
    config = with_unrolled_layers(config, unroll_layers)
    require_dense_text(config)
    weights = open_weight_files(folder)
    stored = weights.tensors
    config = _settle_mtp(config, stored, folder, wanted=mtp)
    spelling = spelling_of(stored, config, where=str(folder))
    bound = list(bound_tensors(config, spelling, mtp=mtp, lm_head=False))
    check_bound(bound, stored, where=str(folder))
    _check_all_known(bound, stored, spelling, config)
    head = f"{spelling.head}lm_head.weight"
    if config.tie_word_embeddings and head in stored:
        _check_equal(stored[f"{spelling.text}embed_tokens.weight"], stored[head])
    layout = SourceLayout(
        config=(folder / "config.json").read_text(encoding="utf-8"),
        headers={name: file.header for name, file in weights.files.items()},
        index=weights.index,
    )
    used = {tensor.name for tensor in bound}
    kept = {
        name: tensor for name, tensor in stored.items() if name.startswith(KEPT_PREFIXES) and name not in used
    }
    return HFCheckpoint(config, stored, bound, KeptTensors(layout, kept))


def _settle_mtp(
    config: ModelConfig, stored: Mapping[str, StoredTensor], folder: Path, *, wanted: bool
) -> ModelConfig:
    announced = config.text.mtp_num_hidden_layers
    present = any(name.startswith("mtp.") for name in stored)
    if wanted and announced != 1:
        raise CheckpointError(
            f"{folder}: the MTP head was asked for, but config.json says mtp_num_hidden_layers {announced},"
            " expected 1"
        )
    if wanted and not present:
        raise CheckpointError(f"{folder}: the MTP head was asked for, but the weights hold no mtp.* tensors")
    if announced and not present:
        log.warning(
            "%s: config.json says mtp_num_hidden_layers %d, but the weights hold no mtp.* tensors;"
            " going on without the MTP head",
            folder,
            announced,
        )
        return dataclasses.replace(config, text=dataclasses.replace(config.text, mtp_num_hidden_layers=0))
    if present and not announced:
        log.warning(
            "%s: the weights hold mtp.* tensors, but config.json says mtp_num_hidden_layers 0;"
            " they are kept and not used",
            folder,
        )
    return config


def spelling_of(names: Iterable[str], config: ModelConfig, *, where: str) -> Spelling:
    """The one spelling of the text model's prefix that a checkpoint uses.

    Raises:
        CheckpointError: two spellings in one checkpoint, so that one tensor may be there twice.
    """
    found: dict[Spelling, str] = {}
    heads: dict[str, str] = {}
    for name in names:
        if name.startswith(KEPT_PREFIXES):
            continue
        if name.endswith("lm_head.weight"):
            heads[name.removesuffix("lm_head.weight")] = name
            continue
        spelling = next((each for each in SPELLINGS if name.startswith(each.text)), None)
        if spelling is not None:
            found.setdefault(spelling, name)
    for several in (list(found.values()), list(heads.values())):
        if len(several) > 1:
            raise CheckpointError(
                f"{where}: '{several[0]}' and '{several[1]}' spell the model's prefix in two ways;"
                f" expected one of {', '.join(each.text for each in SPELLINGS)}"
            )
    if not found:
        return default_spelling(config)
    (spelling,) = found
    return dataclasses.replace(spelling, head=next(iter(heads), spelling.head))


def check_bound(bound: list[BoundTensor], stored: Mapping[str, StoredTensor], *, where: str) -> None:
    """Raises `CheckpointError` for a tensor that is missing or has another shape than the config asks for."""
    missing = [tensor.name for tensor in bound if tensor.name not in stored]
    if missing:
        others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(
            f"{where}: tensor '{missing[0]}'{others} missing from the weights, though config.json asks for it"
        )
    for tensor in bound:
        found = stored[tensor.name]
        if found.shape != tensor.shape:
            raise CheckpointError(
                f"{found.file}: tensor '{tensor.name}' has shape {list(found.shape)},"
                f" but config.json asks for {list(tensor.shape)}"
            )


def _check_all_known(
    bound: list[BoundTensor],
    stored: Mapping[str, StoredTensor],
    spelling: Spelling,
    config: ModelConfig,
) -> None:
    known = {tensor.name for tensor in bound}
    if config.tie_word_embeddings:
        known.add(f"{spelling.head}lm_head.weight")
    for name, tensor in stored.items():
        if name not in known and not name.startswith(KEPT_PREFIXES):
            raise CheckpointError(
                f"{tensor.file}: tensor '{name}' belongs to no part of the model that config.json describes"
            )
        if name.startswith("mtp.") and name not in known and known >= {"mtp.fc.weight"}:
            raise CheckpointError(f"{tensor.file}: tensor '{name}' belongs to no part of the MTP head")


def _check_equal(embedding: StoredTensor, head: StoredTensor) -> None:
    """A tied checkpoint may store its head, but not another one than the embedding."""
    if embedding.shape == head.shape and embedding.dtype == head.dtype:
        piece = 16 << 20
        for start in range(0, embedding.nbytes, piece):
            pair = [np.empty(min(piece, embedding.nbytes - start), np.uint8) for _ in range(2)]
            embedding.read_bytes_into(pair[0], start=start)
            head.read_bytes_into(pair[1], start=start)
            if not np.array_equal(pair[0], pair[1]):
                break
        else:
            return
    raise CheckpointError(
        f"{head.file}: tensor '{head.name}' differs from the embedding, though config.json says"
        " tie_word_embeddings; correct the flag or remove the tensor"
    )
