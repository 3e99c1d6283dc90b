"""Any list of layer kinds becomes patterns and repeats that give the same list back."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from qwen35_jax.layer_groups import LayerGroup, layer_groups, layer_locations, shortest_grouping
from tests.small_text_model import FULL, LINEAR, small_config

MOTIF = (LINEAR, LINEAR, LINEAR, FULL)


@pytest.mark.parametrize("motifs", [2, 6, 16])
def test_a_published_stack_is_one_motif_repeated(motifs):
    assert shortest_grouping(MOTIF * motifs) == (LayerGroup(MOTIF, motifs),)


def test_an_irregular_tail_becomes_a_group_of_its_own():
    groups = shortest_grouping(MOTIF * 3 + (LINEAR, FULL))
    assert sum(len(group.pattern) for group in groups) <= 6
    assert _expand(groups) == MOTIF * 3 + (LINEAR, FULL)


@hypothesis.given(st.lists(st.sampled_from([LINEAR, FULL]), min_size=1, max_size=24))
def test_groups_written_out_give_the_layers_back(kinds):
    groups = shortest_grouping(tuple(kinds))
    assert _expand(groups) == tuple(kinds)
    assert sum(len(group.pattern) for group in groups) <= len(kinds)


@pytest.mark.parametrize("unroll", [False, True])
def test_every_layer_has_a_location_that_holds_its_kind(unroll):
    layer_types = MOTIF * 2 + (FULL, LINEAR)
    model = small_config(layer_types, unroll_layers=unroll).text
    groups = layer_groups(model)
    locations = list(layer_locations(model))
    assert len(set(locations)) == len(layer_types)
    for location, kind in zip(locations, layer_types, strict=True):
        assert groups[location.group].pattern[location.position] == kind
        assert location.repeat < groups[location.group].repeats


def test_unrolled_layers_are_one_pattern_run_once():
    stacked = small_config(MOTIF * 4).text
    unrolled = dataclasses.replace(stacked, unroll_layers=True)
    assert layer_groups(unrolled) == (LayerGroup(MOTIF * 4, 1),)


def _expand(groups):
    return tuple(kind for group in groups for _ in range(group.repeats) for kind in group.pattern)
