"""`generate` on the tiny model. Prompts are cut into pieces of 16 tokens, so that many take several pieces and few
programs are compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.errors import NonFiniteError, PromptError
from qwen35_jax.inference import generation
from qwen35_jax.inference.buckets import prefill_chunks
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.programs import PASSES_IN_A_BLOCK, decode_block, first_token, prefill_chunk
from qwen35_jax.inference.results import Generation, TokenEvent
from qwen35_jax.inference.rows import fresh_rows
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.model import forward, prefill
from tests.inference.tiny_model import CONTEXT, VOCABULARY, TinyModel

NEW = 12
GREEDY = GenerationSettings(max_new_tokens=NEW)
RANDOM = GenerationSettings(max_new_tokens=NEW, temperature=1.0, top_p=0.95, seed=7)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "prefill_chunks", functools.partial(prefill_chunks, buckets=(16,)))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, VOCABULARY - 1, length).tolist()


def alone(
    model: TinyModel, tokens: Sequence[int], settings: GenerationSettings, **options: Any
) -> Generation:
    return generate(model, [tokens], settings, **options).generations[0]


@pytest.fixture(scope="module")
def greedy_40(tiny: TinyModel) -> Generation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "prefill_chunks", functools.partial(prefill_chunks, buckets=(16,)))
        return alone(tiny, prompt(40), GREEDY)


def test_greedy_tokens_are_those_of_the_whole_sequence_run_at_once(
    tiny: TinyModel, greedy_40: Generation
) -> None:
    tokens = jnp.asarray([greedy_40.prompt_tokens + greedy_40.tokens])
    logits = jax.jit(forward, static_argnums=0)(tiny.graphdef, tiny.parameters, tokens)
    expected = jnp.argmax(logits[0, 39:-1], axis=-1)
    assert greedy_40.tokens == tuple(expected.tolist())
    assert len(set(greedy_40.tokens)) > 3  # a constant answer would prove little
    assert greedy_40.finish_reason == "length"


def test_b04_a_row_gives_the_same_answer_beside_others_of_any_length(
    tiny: TinyModel, greedy_40: Generation
) -> None:
    prompts = [prompt(4), prompt(12), prompt(40)]
    for settings in (GREEDY, RANDOM):
        together = generate(tiny, prompts, settings).generations
        for tokens, row in zip(prompts, together, strict=True):
            assert row.prompt_tokens == tuple(tokens)
            assert row.tokens == alone(tiny, tokens, settings).tokens
    assert generate(tiny, prompts, GREEDY).generations[2].tokens == greedy_40.tokens


def test_rows_may_have_their_own_settings(tiny: TinyModel) -> None:
    prompts = [prompt(4), prompt(12), prompt(40)]
    settings = [
        GenerationSettings(max_new_tokens=3),
        dataclasses.replace(RANDOM, seed=1),
        GenerationSettings(max_new_tokens=9, repetition_penalty=1.3, presence_penalty=0.5),
    ]
    together = generate(tiny, prompts, settings).generations
    assert [len(row.tokens) for row in together] == [3, NEW, 9]
    for tokens, wanted, row in zip(prompts, settings, together, strict=True):
        assert row.tokens == alone(tiny, tokens, wanted).tokens


def test_a_seed_repeats_an_answer_and_a_drawn_seed_is_told(tiny: TinyModel) -> None:
    free = alone(tiny, prompt(4), dataclasses.replace(RANDOM, seed=None))
    again = alone(tiny, prompt(4), dataclasses.replace(RANDOM, seed=free.seed))
    assert again.tokens == free.tokens
    others = {alone(tiny, prompt(4), dataclasses.replace(RANDOM, seed=seed)).tokens for seed in range(5)}
    assert len(others) == 5


def test_b90_every_stop_id_ends_a_row_and_shows_in_no_text(
    tiny: TinyModel, greedy_40: Generation, ascii_tokenizer: Tokenizer
) -> None:
    full = alone(tiny, prompt(40), GREEDY, tokenizer=ascii_tokenizer)
    for position in (0, 4, 7):
        stop_id = full.tokens[position]
        first = full.tokens.index(stop_id)
        row = alone(tiny, prompt(40), GREEDY, tokenizer=ascii_tokenizer, stop_ids=[90, stop_id])
        assert row.tokens == full.tokens[: first + 1]
        assert row.finish_reason == "stop"
        assert row.text == ascii_tokenizer.decode(full.tokens[:first])
        through = dataclasses.replace(GREEDY, ignore_eos=True)
        assert alone(tiny, prompt(40), through, stop_ids=[stop_id]).tokens == full.tokens


def test_b90_min_new_tokens_masks_every_stop_id(tiny: TinyModel, greedy_40: Generation) -> None:
    stop_ids = greedy_40.tokens[:2]
    at_once = alone(tiny, prompt(40), GREEDY, stop_ids=stop_ids)
    assert len(at_once.tokens) == 1
    later = alone(tiny, prompt(40), dataclasses.replace(GREEDY, min_new_tokens=5), stop_ids=stop_ids)
    assert len(later.tokens) > 5
    assert not set(later.tokens[:5]) & set(stop_ids)


def test_b05_b90_a_stopped_row_emits_padding_and_its_cache_is_frozen_while_others_go_on(
    tiny: TinyModel,
) -> None:
    prompts = [prompt(4), prompt(12), prompt(40)]
    full = generate(tiny, prompts, GREEDY).generations
    stop_id = full[1].tokens[2]
    assert stop_id not in full[1].tokens[:2]
    run = generation._Run(
        tiny, prompts, [GREEDY] * 3, None, (stop_id,), on_token=lambda event: None, speculation=None
    )
    model = (tiny.graphdef, run.placement, tiny.parameters)
    memory = run._empty()
    rows, sampling, limits = run.placement.put(
        (fresh_rows(run.prompts, VOCABULARY, [True] * 3), run.sampling, run.limits)
    )
    for tokens, segment_ids in run._padded_chunks():
        memory = prefill_chunk(*model, memory, tokens, segment_ids)
    memory, rows, emission = first_token(*model, memory, rows, sampling, limits)
    emitted = [emission]
    for step in range(1, 8):
        before = jax.device_get(memory.cache)
        memory, rows, block = decode_block(*model, memory, rows, np.ones(3, bool), sampling, limits, steps=1)
        cache = memory.cache
        emission = jax.tree.map(lambda x: x[0, 0], block)
        emitted.append(emission)
        frozen = [not active for active in emission.emitted]
        assert frozen[1] == (step > 2)
        for row in range(3):
            same = [
                np.array_equal(old[:, row], new[:, row])
                for old, new in zip(
                    jax.tree.leaves(before.groups), jax.tree.leaves(cache.groups), strict=True
                )
            ]
            assert all(same) if frozen[row] else not any(same)
        # B05: what a row has consumed is counted exactly.
        expected = [len(tokens) + step for tokens in prompts]
        assert cache.lengths[0] == expected[0]
        assert cache.lengths[1] == len(prompts[1]) + min(step, 2)
    tokens = np.array([step.token for step in emitted])
    assert tokens[:, 1].tolist() == [*full[1].tokens[:3], *[tiny.config.text.pad_token_id] * 5]
    assert tokens[:, 0].tolist() == list(full[0].tokens[:8])


def test_b91_stop_strings_end_the_text_before_them(tiny: TinyModel, ascii_tokenizer: Tokenizer) -> None:
    full = alone(tiny, prompt(40), GREEDY, tokenizer=ascii_tokenizer)
    stop = full.text[5:7]  # two tokens: the edge lies inside
    cut = full.text.index(stop)
    row = alone(
        tiny, prompt(40), dataclasses.replace(GREEDY, stop=("never", stop)), tokenizer=ascii_tokenizer
    )
    assert row.text == full.text[:cut]
    assert row.finish_reason == "stop"
    assert row.tokens == full.tokens[: cut + 2]


def test_b91_events_add_up_to_the_answer(tiny: TinyModel, ascii_tokenizer: Tokenizer) -> None:
    events: list[TokenEvent] = []
    prompts = [prompt(4), prompt(12), prompt(40)]
    rows = generate(tiny, prompts, RANDOM, tokenizer=ascii_tokenizer, on_token=events.append).generations
    for index, row in enumerate(rows):
        mine = [event for event in events if event.row == index]
        assert tuple(event.token for event in mine[:-1]) == row.tokens
        assert "".join(event.text for event in mine) == row.text == ascii_tokenizer.decode(row.tokens)
        assert [event.finish_reason for event in mine] == [None] * len(row.tokens) + [row.finish_reason]
        assert mine[-1].token is None


def test_text_prompts_are_encoded(tiny: TinyModel, ascii_tokenizer: Tokenizer) -> None:
    text = alone(tiny, "Hello", GREEDY, tokenizer=ascii_tokenizer)  # type: ignore[arg-type]
    assert text == dataclasses.replace(
        alone(tiny, ascii_tokenizer.encode("Hello"), GREEDY, tokenizer=ascii_tokenizer), seed=text.seed
    )


def test_ids_without_a_token_are_never_drawn(tiny: TinyModel, ascii_tokenizer: Tokenizer) -> None:
    # Row 96 of the (tied) embedding wins whenever any token does, by far.
    embedding = tiny.parameters["embed_tokens"]["weight"]
    winner = embedding.at[VOCABULARY - 1].set(50 * embedding[alone(tiny, prompt(4), GREEDY).tokens[0]])
    rigged = dataclasses.replace(
        tiny, parameters={**tiny.parameters, "embed_tokens": {"weight": winner.block_until_ready()}}
    )
    assert alone(rigged, prompt(4), GREEDY).tokens[0] == VOCABULARY - 1
    for settings in (GREEDY, RANDOM):
        row = alone(rigged, prompt(4), settings, tokenizer=ascii_tokenizer)
        assert VOCABULARY - 1 not in row.tokens


def test_b06_a_single_row_padded_on_the_left_gives_the_logits_of_the_unpadded_one(tiny: TinyModel) -> None:
    run = generation._Run(tiny, [prompt(9)], [GREEDY], None, (), lambda event: None, None)
    padding = np.random.default_rng(1).integers(1, VOCABULARY, (1, 7))
    results = []
    for tokens, segment_ids in (
        (np.concatenate([[prompt(9)], padding], axis=1), [[1] * 9 + [0] * 7]),
        (np.concatenate([padding, [prompt(9)]], axis=1), [[0] * 7 + [1] * 9]),
    ):
        arguments = tokens.astype(np.int32), np.array(segment_ids, np.int32)
        model = tiny.graphdef, run.placement, tiny.parameters
        results.append(prefill_chunk(*model, run._empty(), *arguments))
    jax.tree.map(lambda right, left: np.testing.assert_allclose(left, right, atol=1e-5), *results)


def test_b95_prompts_of_1_to_40_tokens_give_finite_logits(tiny: TinyModel) -> None:
    for length in range(1, 41):
        assert len(alone(tiny, prompt(length, seed=1), GenerationSettings(max_new_tokens=1)).tokens) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_b95_broken_weights_raise_instead_of_giving_token_0(tiny: TinyModel, bad: float) -> None:
    embedding = tiny.parameters["embed_tokens"]["weight"]
    broken = dataclasses.replace(
        tiny, parameters={**tiny.parameters, "embed_tokens": {"weight": embedding.at[17, 3].set(bad)}}
    )
    for settings in (GREEDY, RANDOM):
        with pytest.raises(NonFiniteError, match="row 0 hold NaN or infinity at step 0"):
            alone(broken, prompt(4), settings)


def test_b95_logits_that_break_later_name_their_step(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(*arguments: Any) -> Any:
        memory, rows, emission = decode_block(*arguments)
        # The first token is step 0, so that the third pass of the first block draws step 3.
        breaks = (jnp.arange(PASSES_IN_A_BLOCK)[:, None, None] >= 2) & (jnp.arange(3) == 1)
        return memory, rows, emission._replace(finite=~breaks)

    breaking.lower = decode_block.lower  # type: ignore[attr-defined]
    monkeypatch.setattr(generation, "decode_block", breaking)
    with pytest.raises(NonFiniteError, match=r"row 1 hold NaN or infinity at step 3 \(token 15\)"):
        generate(tiny, [prompt(4), prompt(12), prompt(40)], GREEDY)


def test_b94_prompts_of_any_length_and_any_settings_compile_one_program_per_bucket(
    tiny: TinyModel, ascii_tokenizer: Tokenizer
) -> None:
    programs = (prefill_chunk, first_token, decode_block)
    before = [program._cache_size() for program in programs]
    for length in (1, 3, 7, 8, 9, 15, 16, 17, 24, 40, 120, 300):
        result = generate(tiny, [prompt(length)], dataclasses.replace(RANDOM, top_k=length))
        assert result.timing.prefill_tokens == length
    for settings in (GREEDY, dataclasses.replace(GREEDY, stop=("x",), min_new_tokens=2, max_new_tokens=3)):
        generate(tiny, [prompt(5)], settings, tokenizer=ascii_tokenizer, stop_ids=range(7))
    grown = [program._cache_size() - old for program, old in zip(programs, before, strict=True)]
    assert grown[0] <= 1  # the number of buckets here
    assert grown[1] <= 1
    assert grown[2] <= 1
    assert generate(tiny, [prompt(11)], GREEDY).timing.compile_seconds < 0.5


def test_b94_a_long_chunk_is_no_larger_a_program_than_a_short_one(tiny: TinyModel) -> None:
    def equations(jaxpr: Any) -> int:
        inner = [sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
        return len(jaxpr.eqns) + sum(map(equations, inner))

    sizes = []
    for length in (512, 4096):
        run = generation._Run(tiny, [[1]], [GREEDY], None, (), lambda event: None, None)
        cache = run._empty().cache
        program = jax.make_jaxpr(functools.partial(prefill, tiny.graphdef))(
            tiny.parameters,
            jnp.zeros((1, length), jnp.int32),
            cache,
            segment_ids=jnp.ones((1, length), jnp.int32),
        )
        sizes.append(equations(program.jaxpr))
    assert sizes[1] <= 1.2 * sizes[0]


def test_timing_counts_tokens_and_leaves_compilation_out(tiny: TinyModel) -> None:
    timing = generate(tiny, [prompt(4), prompt(12), prompt(40)], GREEDY).timing
    assert timing.prefill_tokens == 56
    assert timing.decode_tokens == 3 * (NEW - 1)
    assert timing.prefill_tokens_per_second == 56 / timing.prefill_seconds
    assert timing.decode_tokens_per_second == 33 / timing.decode_seconds
    single = generate(tiny, [prompt(4)], GenerationSettings(max_new_tokens=1)).timing
    assert (single.decode_tokens, single.decode_tokens_per_second) == (0, 0.0)


@pytest.mark.parametrize(
    ("prompts", "settings", "complaint"),
    [
        ([], None, "at least one prompt"),
        ("abc", None, "a list of at least one prompt"),
        ([[]], None, "prompt 0 is empty"),
        ([5, 17, 3], None, r"prompt 0 is 5, expected .* as in \[\[5, 17, 3\]\]"),
        ([[1], [VOCABULARY]], None, "is 97, expected an id from 0 to 96"),
        ([[1], [-1]], None, "is -1, expected"),
        ([["a"]], None, "expected an integer"),
        ([[1] * CONTEXT], None, "leaves no room to answer in the model's context of 700"),
        ([[1] * 690], GREEDY, "690 tokens and 12 more are asked for.*at most 10"),
        ([[1]], [GREEDY, GREEDY], "settings holds 2 entries, expected one per prompt"),
        ([[1]], {"top_k": 3}, "settings is {'top_k': 3}, expected GenerationSettings"),
        ([[1]], [{"top_k": 3}], r"settings is \[{'top_k': 3}\], expected GenerationSettings"),
        (["text"], None, "comes without a folder"),
        ([[1]], GenerationSettings(stop=("x",)), "comes without a folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(
    tiny: TinyModel, prompts: Any, settings: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_Run", None)
    with pytest.raises(PromptError, match=complaint):
        generate(tiny, prompts, settings)


def test_a_stop_id_that_is_none_is_refused(tiny: TinyModel) -> None:
    for bad in ([3, "a"], [-1], [2**31], {1.5}):
        with pytest.raises(PromptError, match=r"stop_ids is .*, expected a token id or a list"):
            generate(tiny, [[1]], stop_ids=bad)  # type: ignore[arg-type]


def test_without_a_length_the_answer_ends_with_the_context(tiny: TinyModel) -> None:
    tokens, (settings,) = generation.check_prompts([[1] * (CONTEXT - 5)], None, tiny.config.text)
    assert settings.max_new_tokens == 5
    assert len(tokens[0]) == CONTEXT - 5
    _, (settings,) = generation.check_prompts([[1]], None, tiny.config.text)
    assert settings.max_new_tokens == 128
