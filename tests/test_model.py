"""The text model as a whole: one answer, whichever way its layers are run and its tokens are fed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.config import MoEConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.layer_groups import layer_locations
from qwen35_jax.model import _extend, abstract_model, forward, init_model, prefill
from qwen35_jax.nn.decoder import DecoderLayer
from qwen35_jax.nn.embedding import Embedding
from qwen35_jax.nn.parameter import key_stream
from tests.small_text_model import (
    BOUNDS,
    COMPILE_QUICKLY,
    FULL,
    LINEAR,
    ROWS,
    SmallModel,
    arrange,
    difference,
    document,
    draw,
    logits_of,
    small_config,
    small_model,
    tree_difference,
)


@pytest.fixture(params=["float64", "float32"])
def model(request) -> Iterator[SmallModel]:
    with jax.enable_x64(request.param == "float64"):
        yield small_model(request.param)


@pytest.fixture
def model64() -> Iterator[SmallModel]:
    with jax.enable_x64(True):
        yield small_model("float64")


def test_prefill_and_decoding_give_the_logits_of_the_forward(model):
    texts = [document(row, length) for row, length in enumerate((42, 33, 20))]
    tokens, segment_ids = arrange([[text] for text in texts])
    whole = np.asarray(logits_of(model.graphdef, model.parameters, tokens, segment_ids))
    starts = [30, 21, 2]
    logits, cache = model.prefill(
        [[text[:start]] for text, start in zip(texts, starts, strict=True)], model.new_cache()
    )
    for step in range(12):
        at = np.array(starts) - 1 + step
        assert difference(logits, whole[range(ROWS), at]) <= BOUNDS[model.dtype]
        logits, cache = model.step(tokens[range(ROWS), at + 1], cache)
    assert cache.lengths.tolist() == [42, 33, 14]


def test_where_a_row_lies_and_what_lies_beside_it_changes_nothing(model):
    text = document(3, 20)
    rows = [
        [[text], [], []],
        [[document(4, 42)], [22, text], [document(5, 1)]],
        [[], [document(6, 9)], [11, text, 11]],
    ]
    answers = []
    for row, arranged in enumerate(rows):
        tokens, segment_ids = arrange(arranged)
        logits = np.asarray(logits_of(model.graphdef, model.parameters, tokens, segment_ids))
        answers.append(logits[row][segment_ids[row] > 0])
    assert difference(answers[1], answers[0]) <= BOUNDS[model.dtype]
    assert difference(answers[2], answers[0]) <= BOUNDS[model.dtype]


IRREGULAR = (LINEAR, FULL, FULL, LINEAR, FULL)


def test_layers_in_groups_unrolled_and_one_by_one_are_the_same(x64):
    """An irregular list of layers, with a memory carried over: hidden values, and what every layer remembers."""
    model = small_model("float64", IRREGULAR)
    config = model.config.text
    layers = [
        jax.tree.map(
            lambda leaf, at=at: leaf[at.repeat],
            model.parameters["decoder"]["groups"][at.group]["layers"][at.position],
        )
        for at in layer_locations(config)
    ]
    unrolled = dataclasses.replace(
        model,
        config=small_config(IRREGULAR, unroll_layers=True),
        graphdef=abstract_model(
            small_config(IRREGULAR, unroll_layers=True), parameter_dtype="float64", dtype="float64"
        )[0],
        parameters=model.parameters
        | {
            "decoder": {
                "groups": {0: {"layers": dict(enumerate(jax.tree.map(lambda leaf: leaf[None], layers)))}}
            }
        },
    )
    tokens, more = document(1, 14).reshape(2, 7), document(2, 6).reshape(2, 3)

    def by_model(which: SmallModel):
        @jax.jit(compiler_options=COMPILE_QUICKLY)
        def run(parameters):
            whole = nnx.merge(which.graphdef, parameters)
            hidden, cache = whole(tokens, cache=which.new_cache(rows=2, capacity=12))
            later, cache = whole(more, cache=cache)
            memory = [
                jax.tree.map(lambda leaf, at=at: leaf[at.repeat], cache.groups[at.group][at.position])
                for at in layer_locations(which.config.text)
            ]
            return hidden, later, memory

        return run(which.parameters)

    @jax.jit(compiler_options=COMPILE_QUICKLY)
    def one_by_one(parameters, layers):
        whole = nnx.merge(model.graphdef, parameters)
        both = jnp.concatenate([tokens, more], axis=1)
        context = whole.context(both, None, None, None)
        x = whole.embed(both)
        memory = []
        for kind, layer_parameters in zip(IRREGULAR, layers, strict=True):
            layer = DecoderLayer(config, kind, parameter_dtype="float64", keys=None)
            x, update = nnx.merge(nnx.graphdef(layer), layer_parameters)(x, context, None)
            memory.append(update)
        hidden = whole.final_norm(x)
        return hidden[:, :7], hidden[:, 7:], memory

    hidden, later, memory = one_by_one(model.parameters, layers)
    for which in (model, unrolled):
        ours = by_model(which)
        assert difference(ours[0], hidden) <= 1e-12
        assert difference(ours[1], later) <= 1e-12
        for kind, kept, expected in zip(IRREGULAR, ours[2], memory, strict=True):
            if kind == FULL:
                kept = jax.tree.map(lambda leaf: leaf[:, :10], kept)
            assert tree_difference(kept, expected) <= 1e-12


def test_the_draft_head_gives_on_the_whole_what_it_gives_on_every_prefix_and_document(x64):
    model = small_model("float64", (LINEAR, FULL), mtp=True)

    @jax.jit(compiler_options=COMPILE_QUICKLY)
    def draft(parameters, tokens, segment_ids):
        whole = nnx.merge(model.graphdef, parameters)
        hidden, _ = whole(tokens, segment_ids=segment_ids)
        return whole.draft_hidden(hidden, tokens, segment_ids=segment_ids)

    text, other = document(1, 17), document(2, 6)
    whole = np.asarray(draft(model.parameters, *arrange([[text], [other, text, 1, other], [5, other]])))
    packed, alone = whole[1], whole[2]
    assert difference(packed[:5], alone[5:10]) <= 1e-12
    assert difference(packed[6:22], whole[0, :16]) <= 1e-12
    assert difference(packed[24:29], alone[5:10]) <= 1e-12
    for lengths in ((2, 3, 4), (5, 9, 16)):
        drafted = np.asarray(draft(model.parameters, *arrange([[text[:length]] for length in lengths])))
        for row, length in enumerate(lengths):
            assert difference(drafted[row, : length - 1], whole[0, : length - 1]) <= 1e-12


def program(function, *arguments) -> str:
    """The traced program as text. Addresses of Python objects are not part of it."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(*arguments)))


def test_the_model_is_one_program_in_every_mode_of_nnx():
    tokens, segment_ids = arrange([[document(0, 9)]])
    config = small_config()
    programs, structures = set(), set()
    for graph in (True, False):
        for updates in (True, False):
            with nnx.set_graph_mode(graph), nnx.set_graph_updates(updates):
                graphdef, parameters = abstract_model(config, parameter_dtype="float32", dtype="float32")
                programs.add(
                    program(
                        lambda parameters, graphdef=graphdef: forward(
                            graphdef, parameters, tokens, segment_ids=segment_ids
                        ),
                        parameters,
                    )
                )
                structures.add(str(jax.tree.structure(parameters)))
    assert len(programs) == 1
    assert len(structures) == 1


def test_an_abstract_model_is_a_drawn_one_without_its_arrays():
    config = small_config()
    wanted = {"parameter_dtype": "bfloat16", "dtype": "float32", "mtp": True}
    graphdef, abstract = abstract_model(config, **wanted)
    drawn = jax.eval_shape(lambda: init_model(config, seed=0, **wanted)[1])
    assert graphdef == abstract_model(config, **wanted)[0]
    assert hash(graphdef) == hash(abstract_model(config, **wanted)[0])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drawn) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )


def test_a_seed_draws_the_same_model_and_no_two_parameters_alike():
    config = small_config((LINEAR, LINEAR, FULL) * 2)

    @jax.jit(compiler_options=COMPILE_QUICKLY)
    def drawn_from(seed):
        return init_model(config, seed=seed, parameter_dtype="float32", dtype="float32")[1]

    one, same, other = (drawn_from(seed) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    first, second, _ = one["decoder"]["groups"][0]["layers"].values()
    mixers = [first["mixer"], second["mixer"]]
    drawn = [mixer["q_weight"][repeat] for mixer in mixers for repeat in range(2)]
    drawn += [mixer["k_weight"][repeat] for mixer in mixers for repeat in range(2)]
    drawn.append(other["decoder"]["groups"][0]["layers"][0]["mixer"]["q_weight"][0])
    assert len({np.asarray(array).tobytes() for array in drawn}) == 9
    decay_rate = np.exp(mixers[0]["A_log"])
    assert ((decay_rate > 0) & (decay_rate <= 16)).all()
    time_step = np.log1p(np.exp(mixers[0]["dt_bias"]))
    assert ((time_step > 0.99e-3) & (time_step < 1.01e-1)).all()
    assert not np.any(first["input_norm"]["weight"])
    assert np.all(mixers[0]["norm_weight"] == 1)


def test_a_tied_head_scores_with_the_embedding():
    config = dataclasses.replace(small_config((FULL,)), tie_word_embeddings=True)
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32")
    assert "lm_head" not in abstract
    parameters = jax.tree_util.tree_map_with_path(draw, abstract)
    text = nnx.merge(graphdef, parameters)
    hidden = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float32)
    expected = hidden @ np.asarray(parameters["embed_tokens"]["weight"]).T
    assert difference(text.logits(jnp.asarray(hidden)), expected) <= 1e-6


def test_parts_that_are_not_built_yet_are_refused_by_name():
    mixture = dataclasses.replace(small_config().text, intermediate_size=None, moe=MoEConfig(6, 2, 24, 20))
    config = dataclasses.replace(small_config(), text=mixture)
    with pytest.raises(ConfigError, match="expert"):
        abstract_model(config, parameter_dtype="float32", dtype="float32")


def size(jaxpr) -> int:
    """Operations of a traced program, those of loop bodies and inner functions counted once each."""
    inner = [
        parameter
        for equation in jaxpr.eqns
        for value in equation.params.values()
        for parameter in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(parameter, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)
    ]
    return len(jaxpr.eqns) + sum(size(getattr(one, "jaxpr", one)) for one in inner)


def size_of_prefill(layers: int, time: int) -> int:
    config = small_config((LINEAR, LINEAR, LINEAR, FULL) * (layers // 4))
    graphdef, parameters = abstract_model(config, parameter_dtype="bfloat16", dtype="bfloat16")
    model = SmallModel(config, graphdef, parameters, "bfloat16")
    cache = jax.eval_shape(lambda: model.new_cache(capacity=time))
    tokens = jax.ShapeDtypeStruct((ROWS, time), jnp.int32)
    traced = jax.make_jaxpr(
        lambda parameters, tokens, cache: prefill(graphdef, parameters, tokens, cache, segment_ids=tokens)
    )(parameters, tokens, cache)
    return size(traced.jaxpr)


def test_b94_the_program_grows_neither_with_depth_nor_with_length():
    base = size_of_prefill(8, 512)
    assert base > 500
    assert size_of_prefill(64, 512) <= 1.2 * base
    assert size_of_prefill(8, 4096) <= 1.2 * base


def test_b94_prompts_of_every_length_and_every_set_of_active_rows_are_two_programs(model64):
    cache = model64.new_cache()
    _, cache = model64.prefill([[document(0, 3)]], cache)
    _, cache = model64.step([1, 2, 3], cache)
    before = _extend._cache_size()
    for length in (1, 2, 17, 20):
        _, cache = model64.prefill([[length, document(0, length)], [], [document(1, 1)]], cache)
        _, cache = model64.step([1, 2, 3], cache, [False, length > 2, True])
    assert _extend._cache_size() == before


def test_an_id_outside_the_vocabulary_gives_nan_and_not_the_nearest_row():
    config = small_config().text
    embedding = Embedding(config, parameter_dtype=jnp.float32, keys=key_stream(jax.random.key(0)))
    rows = embedding.lookup(jnp.array([[0, config.vocab_size - 1, config.vocab_size, -1]]), jnp.float32)
    assert jnp.isfinite(rows).all(axis=-1).tolist() == [[True, True, False, False]]
