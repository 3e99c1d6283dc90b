from __future__ import annotations

import pytest

from qwen35_jax.inference.buckets import PREFILL_BUCKETS, cache_capacity, prefill_chunks


def test_chunks_cover_the_prompt_once_and_in_order() -> None:
    for length in range(1, 1700):
        chunks = prefill_chunks(length)
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert chunks[-1].stop == length
        for chunk in chunks:
            assert 0 < chunk.stop - chunk.start <= chunk.padded_length
            assert chunk.padded_length in PREFILL_BUCKETS
            # Only the last piece is padded: the ones before it are full.
            assert chunk is chunks[-1] or chunk.stop - chunk.start == chunk.padded_length


def test_b94_prompts_of_1_to_300_tokens_use_a_handful_of_shapes() -> None:
    shapes = {chunk.padded_length for length in range(1, 301) for chunk in prefill_chunks(length)}
    assert shapes <= set(PREFILL_BUCKETS)
    assert len({cache_capacity(length + 128, 32_768) for length in range(1, 301)}) == 1


def test_padding_at_most_doubles_the_work() -> None:
    for length in range(16, 2000):
        assert sum(chunk.padded_length for chunk in prefill_chunks(length)) < 2 * length


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [16]),
        (16, [16]),
        (17, [32]),
        (300, [256, 64]),
        (500, [512]),
        (1024, [512, 512]),
        (1030, [512, 512, 16]),
    ],
)
def test_examples(length: int, expected: list[int]) -> None:
    assert [chunk.padded_length for chunk in prefill_chunks(length)] == expected


def test_capacity_is_a_power_of_two_within_the_context() -> None:
    assert [cache_capacity(n, 4096) for n in (1, 512, 513, 2049, 4096)] == [512, 512, 1024, 4096, 4096]
    assert cache_capacity(70, 100) == 100
    assert cache_capacity(3000, 3500) == 3500
