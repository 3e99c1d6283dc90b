"""From a JSONL file to the rows that a run trains on."""

from __future__ import annotations

from pathlib import Path

from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.chat_spans import ChatDocuments
from qwen35_jax.training.dataset import Summary, TooLong, make_dataset
from qwen35_jax.training.packing import Order, PackedRows
from qwen35_jax.training.records import Chat, read_records


def packed_file(
    file: str,
    model_folder: Path,
    *,
    row_length: int,
    too_long: TooLong,
    pad_id: int,
    order: Order = "shuffled",
) -> tuple[PackedRows, Summary]:
    """The rows of a file, and what became of its records.

    Args:
        file: see `read_records`.
        model_folder: with the tokenizer and, for chats, the chat template.
        row_length: tokens of a row, and of the longest document.
        too_long: see `make_dataset`.
        pad_id: token that fills rows up.
        order: of the rows, see `PackedRows`.

    Raises:
        PromptError: the model has no tokenizer, or for chats no usable template.
        DataError: a line cannot be used, or nothing is left to train; names the line.
    """
    records = read_records(file)
    tokenizer = Tokenizer.from_folder(model_folder)
    chats = None
    if any(isinstance(record.content, Chat) for record in records):
        chats = ChatDocuments(ChatTemplate.from_folder(model_folder), tokenizer)
    dataset = make_dataset(records, tokenizer, chats, context=row_length, too_long=too_long)
    return PackedRows(dataset.documents, row_length, pad_id, order=order), dataset.summary
