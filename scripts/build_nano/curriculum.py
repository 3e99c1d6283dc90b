"""The data of nano's training: a JSONL file of documents in the order in which they are learned."""

from __future__ import annotations

import json
import pathlib

from scripts.build_nano.corpus import Corpus

CURRICULUM_STEPS = 700
"""Steps until recall documents have their full length and number of bindings."""
LAST_STAGE_STEP = 1000
"""From here on most documents are about recall."""


def progress(step: int) -> float:
    """How far the curriculum is at a step, from 0 to 1, and 2 in the last stage."""
    return 2.0 if step >= LAST_STAGE_STEP else min(1.0, step / CURRICULUM_STEPS)


def write_curriculum(
    path: pathlib.Path, corpus: Corpus, *, seed: int, steps: int, rows: int, length: int
) -> None:
    """Writes the documents of all steps; the file appears complete or not at all.

    Args:
        path: of the file. A line is `{"parts": [[text, weight], ...]}`, see `qwen35_jax.training.records`.
        corpus: source of the documents.
        seed: of the drawing.
        steps: of the training.
        rows: of a step.
        length: tokens of a row.
    """
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for step in range(steps):
            drawn = corpus.rows(seed, step, rows=rows, length=length, progress=progress(step))
            for document in (document for row in drawn for document in row):
                file.write(json.dumps({"parts": document.parts}, ensure_ascii=False) + "\n")
    partial.replace(path)
