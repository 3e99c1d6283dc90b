"""Where an engine stands, in numbers."""

from __future__ import annotations

import dataclasses

from qwen35_jax.inference.engine.prefix_cache import PrefixCacheStatistics

COUNTED = (
    "submitted",
    "finished",
    "cancelled",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
)
"""What an engine counts from its start on."""


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """Where an engine stands.

    Attributes:
        slots: of the batch.
        occupied: slots with a request in them.
        queued: requests that wait for a slot.
        submitted: requests taken on since the start.
        finished: of these, answered to their end.
        cancelled: of these, ended by their clients.
        failed: of these, ended by an error.
        prompt_tokens: consumed.
        cached_tokens: of prompts, those that were remembered and did not have to be consumed.
        generated_tokens: drawn.
        compiled_programs: how many the engine has compiled; it stays as it is after the warm-up.
        prefix_cache: see there.
    """

    slots: int
    occupied: int
    queued: int
    submitted: int
    finished: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    compiled_programs: int
    prefix_cache: PrefixCacheStatistics
