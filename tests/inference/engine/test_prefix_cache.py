"""What is kept of prompts that begin alike: the longest prefix is found, blocks are shared, the budget holds."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.inference.engine.prefix_cache import BLOCK, PrefixCache

TOKENS = list(range(1000))


@dataclasses.dataclass(frozen=True)
class Part:
    """A block or a snapshot of so many bytes."""

    of: tuple[int, ...]
    nbytes: int


def cache_of(budget: int = 10**9) -> PrefixCache[Part, Part]:
    return PrefixCache(budget, lambda part: part.nbytes)


def add(cache: PrefixCache[Part, Part], tokens: list[int]) -> list[int]:
    """Keeps a prefix, and returns where the blocks began that had to be read for it."""
    read: list[int] = []

    def block(start: int) -> Part:
        read.append(start)
        return Part(tuple(tokens[: start + BLOCK]), 10)

    cache.add(tokens, block, lambda: Part(tuple(tokens), 100))
    return read


def test_the_longest_kept_prefix_is_found_and_leaves_a_token_to_consume():
    cache = cache_of()
    lengths = [3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 9]
    for length in lengths:
        add(cache, TOKENS[:length])
    for length in range(1, 4 * BLOCK):
        hit = cache.find(TOKENS[:length])
        expected = max((kept for kept in lengths if kept < length), default=0)
        assert (hit.length if hit else 0) == expected
        if hit:
            assert hit.snapshot.of == tuple(TOKENS[:expected])
            # Each block is of the prompt's own tokens, whichever prefix it was read for.
            assert len(hit.blocks) == -(-expected // BLOCK)
            for index, block in enumerate(hit.blocks[: expected // BLOCK]):
                assert block.of == tuple(TOKENS[: (index + 1) * BLOCK])


def test_a_prompt_that_differs_in_one_token_shares_only_what_lies_before_it():
    cache = cache_of()
    for length in (BLOCK, 2 * BLOCK, 2 * BLOCK + 30):
        add(cache, TOKENS[:length])
    for changed, expected in ((0, 0), (BLOCK - 1, 0), (BLOCK, BLOCK), (2 * BLOCK + 3, 2 * BLOCK)):
        prompt = TOKENS[: 3 * BLOCK]
        prompt[changed] += 1
        hit = cache.find(prompt)
        assert (hit.length if hit else 0) == expected
        assert cache.parting(prompt) == expected // BLOCK * BLOCK
    assert (cache.statistics().hits, cache.statistics().misses) == (2, 2)


def test_a_block_is_read_once_and_goes_with_the_last_prefix_that_needs_it():
    cache = cache_of(budget=2 * 100 + 4 * 10)
    assert add(cache, TOKENS[: 2 * BLOCK]) == [0, BLOCK]
    assert add(cache, TOKENS[: 2 * BLOCK]) == []
    assert add(cache, TOKENS[: 3 * BLOCK]) == [2 * BLOCK]
    assert cache.statistics().held == 2 * 100 + 3 * 10
    cache.find(TOKENS[: 2 * BLOCK + 1])  # now the longer prefix is the one used longest ago
    other = [token + 1 for token in TOKENS[:BLOCK]]
    assert add(cache, other) == [0]
    now = cache.statistics()
    assert (now.evicted, now.snapshots, now.held) == (1, 2, 2 * 100 + 3 * 10)
    assert cache.holds(TOKENS[: 2 * BLOCK]) and not cache.holds(TOKENS[: 3 * BLOCK])
    assert cache.parting(TOKENS) == 2 * BLOCK


def test_nothing_is_kept_without_a_budget_and_nothing_that_is_larger_than_it():
    for budget in (0, 105):
        cache = cache_of(budget)
        add(cache, TOKENS[:BLOCK])
        assert cache.statistics().held == 0 and cache.find(TOKENS) is None


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 1500),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4 * BLOCK)), max_size=30),
)
def test_whatever_comes_the_budget_holds_and_bytes_are_those_of_what_is_kept(budget, prompts):
    cache = cache_of(budget)
    for first, length in prompts:
        tokens = [first, *TOKENS[: length - 1]]
        hit = cache.find(tokens)
        assert hit is None or hit.snapshot.of == tuple(tokens[: hit.length])
        add(cache, tokens)
        now = cache.statistics()
        assert now.held <= budget
        blocks = {block.of for index in range(len(prompts)) for block in _blocks(cache, index)}
        assert now.held == 100 * now.snapshots + 10 * len(blocks)


def _blocks(cache: PrefixCache[Part, Part], index: int) -> tuple[Part, ...]:
    """Blocks of one of the kept prefixes, by their names."""
    prefixes = [*cache._prefixes.values()]
    if index >= len(prefixes):
        return ()
    return tuple(dataclasses.replace(cache._blocks[name].content, of=name) for name in prefixes[index].blocks)
