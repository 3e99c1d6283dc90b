"""How fast an answer came, in one line for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen35_jax.inference.results import GenerationResult


def speed_line(result: GenerationResult) -> str:
    """Speeds of a result with one answer."""
    (answer,) = result.generations
    timing = result.timing
    remembered = f" after {answer.cached_tokens} from the prefix cache" if answer.cached_tokens else ""
    passes = (
        f"{answer.tokens_per_pass:.2f} tokens a pass; " if len(answer.tokens) - 1 != answer.passes else ""
    )
    return (
        f"prefill: {timing.prefill_tokens} tokens{remembered}, {timing.prefill_tokens_per_second:.1f} tokens/s; "
        f"decode: {timing.decode_tokens} tokens, {timing.decode_tokens_per_second:.1f} tokens/s; "
        f"{passes}compiling took {timing.compile_seconds:.1f} s before that"
    )
