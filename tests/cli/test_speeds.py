"""The line that tells how fast an answer came."""

from __future__ import annotations

import dataclasses

from qwen35_jax.cli.speeds import speed_line
from qwen35_jax.inference.results import Generation, GenerationResult, Timing

ANSWER = Generation((5,) * 90, (1, 2, 3, 4, 5, 6, 7), "text", "stop", seed=0, passes=4)
TIMING = Timing(
    compile_seconds=1.25, prefill_tokens=90, prefill_seconds=0.5, decode_tokens=6, decode_seconds=0.75
)


def test_a_line_tells_speeds_and_what_was_drafted() -> None:
    assert speed_line(GenerationResult((ANSWER,), TIMING)) == (
        "prefill: 90 tokens, 180.0 tokens/s; decode: 6 tokens, 8.0 tokens/s; 1.50 tokens a pass; "
        "compiling took 1.2 s before that"
    )


def test_what_came_from_the_prefix_cache_is_told_apart() -> None:
    remembering = dataclasses.replace(ANSWER, cached_tokens=64)
    timing = dataclasses.replace(TIMING, prefill_tokens=26)
    line = speed_line(GenerationResult((remembering,), timing))
    assert line.startswith("prefill: 26 tokens after 64 from the prefix cache, 52.0 tokens/s; ")


def test_nothing_is_told_of_drafts_where_a_pass_gives_one_token() -> None:
    plain = dataclasses.replace(ANSWER, passes=6)
    assert "a pass" not in speed_line(GenerationResult((plain,), TIMING))
