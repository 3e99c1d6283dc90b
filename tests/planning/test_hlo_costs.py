"""Counts from a program's text: each instruction of a small program, whose numbers are worked out by hand."""

from __future__ import annotations

import pytest

from qwen35_jax.planning.costs import Collective, count_costs
from qwen35_jax.planning.hlo import Shape, parse
from qwen35_jax.planning.loops import count_runs, trip_count

LOOP = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[6,128]{1,0:T(8,128)(2,1)})->f32[16,128]{1,0}}

%layer (p0: bf16[6,256,128], p1: s32[], p2: bf16[16,256]) -> f32[16,128] {
  %p0 = bf16[6,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,256,128}
  %flat = bf16[256,128]{1,0:T(8,128)(2,1)} bitcast(%slice)
  %p2 = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  ROOT %product = f32[16,128]{1,0:T(8,128)} dot(%p2, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], bf16[6,256,128], bf16[16,256], f32[16,128], /*index=4*/s32[])) -> (s32[]) {
  %p = (s32[]{:T(128)}, bf16[6,256,128]{2,1,0}, bf16[16,256]{1,0:S(1)}, f32[16,128]{1,0}, /*index=4*/s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %stack = bf16[6,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %x = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=2
  %bound = s32[]{:T(128)} get-tuple-element(%p), index=4
  %y = f32[16,128]{1,0:T(8,128)} fusion(%stack, %i, %x), kind=kOutput, calls=%layer
  %sum = f32[16,128]{1,0:T(8,128)} all-reduce(%y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %after = s32[]{:T(128)} add(%next, %one)
  ROOT %t = (s32[], bf16[6,256,128]{2,1,0}, bf16[16,256]{1,0:S(1)}, f32[16,128], s32[]) tuple(%after, %stack, %x, %sum, %bound)
}

%condition (q: (s32[], bf16[6,256,128], bf16[16,256], f32[16,128], s32[])) -> pred[] {
  %q = (s32[], bf16[6,256,128]{2,1,0}, bf16[16,256]{1,0:S(1)}, f32[16,128]{1,0}, s32[]) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %until = s32[]{:T(128)} get-tuple-element(%q), index=4
  ROOT %less = pred[]{:T(512)} compare(%j, %until), direction=LT
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (w: bf16[6,256,128], v: bf16[4,256]) -> f32[16,128] {
  %w = bf16[6,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %v = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(1)
  %all = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} all-gather(%v), replica_groups=[2,4]<=[8], dimensions={0}
  %start = s32[]{:T(128)} constant(1)
  %end = s32[]{:T(128)} constant(12)
  %empty = f32[16,128]{1,0:T(8,128)} broadcast(%start), dimensions={}
  %first = (s32[], bf16[6,256,128]{2,1,0}, bf16[16,256]{1,0:S(1)}, f32[16,128], s32[]) tuple(%start, %w, %all, %empty, %end)
  %loop = (s32[], bf16[6,256,128]{2,1,0}, bf16[16,256], f32[16,128], s32[]) while(%first), condition=%condition, body=%body
  ROOT %result = f32[16,128]{1,0:T(8,128)} get-tuple-element(%loop), index=3
}
"""  # noqa: E501
TRIPS = 6  # from 1 below 12, by 2


def test_shapes_operands_and_calls_are_read():
    module = parse(LOOP)
    assert module.entry == "main"
    body = module.computations["body"]
    assert body.instructions["x"].shapes == (Shape("bf16", (16, 256), memory_space=1),)
    assert len(body.instructions["p"].shapes) == 5
    assert body.instructions["y"].operands == ("stack", "i", "x")
    assert body.instructions["y"].calls == ("layer",)
    assert body.root.name == "t"
    assert [each.name for each in module.computations["layer"].parameters] == ["p0", "p1", "p2"]
    assert module.computations["main"].instructions["end"].literal == "12"


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("pred", 5), ("u4", 3), ("bf16", 10), ("f32", 20), ("f64", 40), ("f8e4m3fn", 5)]
)
def test_bytes_of_element_types(dtype, nbytes):
    assert Shape(dtype, (5,)).nbytes == nbytes


def test_a_loop_with_a_bound_from_outside_and_two_steps_a_trip_is_counted():
    module = parse(LOOP)
    main = module.computations["main"]
    assert trip_count(module, main, main.instructions["loop"]) == TRIPS
    runs = count_runs(module)
    assert runs.times == {"main": 1, "body": TRIPS, "condition": TRIPS + 1, "layer": TRIPS}
    assert runs.unknown == ()


def test_the_compiler_s_own_trip_count_is_taken():
    module = parse(
        LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"},"other":1}')
    )
    main = module.computations["main"]
    assert trip_count(module, main, main.instructions["loop"]) == 5


@pytest.mark.parametrize(
    ("known", "data"),
    [
        ("%end = s32[]{:T(128)} constant(12)", "%end = s32[]{:T(128)} parameter(2)"),
        ("%after = s32[]{:T(128)} add(%next, %one)", "%after = s32[]{:T(128)} multiply(%next, %one)"),
        ("direction=LT", "direction=NE"),
    ],
)
def test_a_loop_that_depends_on_data_runs_as_often_as_it_is_told(known, data):
    assert known in LOOP
    module = parse(LOOP.replace(known, data))
    runs = count_runs(module, trips_where_unknown=9)
    assert runs.unknown == ("loop",)
    assert runs.times["layer"] == 9


def test_products_traffic_and_collectives_of_all_trips_are_counted():
    module = parse(LOOP)
    costs = count_costs(module, count_runs(module), devices=8)
    assert costs.flops == costs.matrix_flops == TRIPS * 2 * 16 * 128 * 256
    gathered = 4 * 256 * 2  # what it sends of; what it makes stays on the chip
    slice_and_result = (
        256 * 128 * 2 + 16 * 128 * 4 + 4
    )  # a layer of the stack and its index, and y; x is on the chip
    summed = 2 * 16 * 128 * 4
    counters = 6 * 4  # two additions of whole numbers
    compared, broadcast = 2 * 4 + 1, 4 + 16 * 128 * 4
    assert costs.hbm_bytes == (
        gathered + broadcast + TRIPS * (slice_and_result + summed + counters) + (TRIPS + 1) * compared
    )
    assert set(costs.collectives) == {
        Collective("all-reduce", 4, TRIPS, TRIPS * 2 * 16 * 128 * 4 * 3 // 4),
        Collective("all-gather", 4, 1, 3 * 4 * 256 * 2),
    }


CONVOLUTIONS = {
    # 16 heads, each [64 128] times [128 32]: a spatial axis on which only equal places meet
    "window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf": (
        "f32[16,64,32]",
        "f32[16,64,128]",
        "f32[16,128,32]",
        2 * 16 * 64 * 32 * 128,
    ),
    "dim_labels=bf_oi->bf": ("f32[64,32]", "f32[64,128]", "f32[32,128]", 2 * 64 * 32 * 128),
    # two places of a kernel over one of the input: a sum over both
    "window={size=2}, dim_labels=b0f_o0i->fb0": (
        "f32[32,64,1]",
        "f32[64,2,128]",
        "f32[32,2,128]",
        2 * 64 * 32 * 2 * 128,
    ),
    # four taps over seven tokens, three of them of padding before the first
    "window={size=4 pad=3_0}, dim_labels=b0f_0io->b0f": (
        "f32[1,7,8]",
        "f32[1,7,5]",
        "f32[4,5,8]",
        2 * 8 * 5 * (4 * 7 - 6),
    ),
}


@pytest.mark.parametrize("labels", CONVOLUTIONS)
def test_products_that_are_written_as_convolutions_count_what_they_multiply(labels):
    out, left, right, flops = CONVOLUTIONS[labels]
    module = parse(
        f"""
ENTRY %main (a: {left}, b: {right}) -> {out} {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %c = {out} convolution(%a, %b), {labels}, operand_precision={{highest,highest}}, metadata={{op_name="x"}}
}}
"""
    )
    costs = count_costs(module, count_runs(module), devices=1)
    assert costs.flops == flops
    assert costs.matrix_flops == 6 * flops


ASYNC = """
%scattered.all-reduce-scatter.1 (p: f32[64,32]) -> f32[16,32] {
  %p = f32[64,32]{1,0} parameter(0)
  %r = f32[64,32]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %z = s32[] constant(0)
  ROOT %s = f32[16,32]{1,0} dynamic-slice(%r, %z, %z), dynamic_slice_sizes={16,32}
}

%begins (q: bf16[8,32]) -> (bf16[8,32], bf16[32,32]) {
  %q = bf16[8,32]{1,0} parameter(0)
  %g = bf16[32,32]{1,0} all-gather(%q), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %b = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%beside (q1: bf16[8,32], d1: bf16[32,32], x: f32[4,32]) -> (f32[4,32], bf16[8,32], bf16[32,32]) {
  %x = f32[4,32]{1,0} parameter(2)
  %n = f32[4,32]{1,0} negate(%x)
  %q1 = bf16[8,32]{1,0} parameter(0)
  %d1 = bf16[32,32]{1,0} parameter(1)
  %g1 = bf16[32,32]{1,0} all-gather(%q1), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %t1 = (f32[4,32]{1,0}, bf16[8,32]{1,0}, bf16[32,32]{1,0}) tuple(%n, %q1, %d1)
}

%ends (q2: bf16[8,32], d2: bf16[32,32]) -> bf16[32,32] {
  %q2 = bf16[8,32]{1,0} parameter(0)
  %d2 = bf16[32,32]{1,0} parameter(1)
  %g2 = bf16[32,32]{1,0} all-gather(%q2), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %e = bf16[32,32]{1,0} custom-call(%q2, %d2, %g2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (m: f32[64,32], o: bf16[8,32], k: f32[4,32]) -> f32[16,32] {
  %m = f32[64,32]{1,0} parameter(0)
  %o = bf16[8,32]{1,0} parameter(1)
  %k = f32[4,32]{1,0} parameter(2)
  %f0 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) fusion(%o), kind=kCustom, calls=%begins
  %h0 = bf16[8,32]{1,0} get-tuple-element(%f0), index=0
  %h1 = bf16[32,32]{1,0} get-tuple-element(%f0), index=1
  %f1 = (f32[4,32]{1,0}, bf16[8,32]{1,0}, bf16[32,32]{1,0}) fusion(%h0, %h1, %k), kind=kLoop, calls=%beside
  %f2 = bf16[32,32]{1,0} fusion(%h0, %h1), kind=kCustom, calls=%ends
  %kernel = f32[4,32]{1,0} custom-call(%k), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1000","bytes_accessed":"77"}}
  ROOT %f3 = f32[16,32]{1,0} fusion(%m), kind=kCustom, calls=%scattered.all-reduce-scatter.1
}
"""  # noqa: E501


def test_a_collective_beside_other_work_counts_once_and_kernels_as_they_declare():
    module = parse(ASYNC)
    costs = count_costs(module, count_runs(module), devices=4)
    assert set(costs.collectives) == {
        Collective("reduce-scatter", 4, 1, 64 * 32 * 4 * 3 // 4),
        Collective("all-gather", 4, 1, 3 * 8 * 32 * 2),
    }
    assert costs.sent_bytes == sum(each.nbytes for each in costs.collectives)
    assert costs.flops == 1000
    gathered, beside, scattered = (8 + 32) * 32 * 2, 2 * 4 * 32 * 4, (64 + 16) * 32 * 4
    assert costs.hbm_bytes == gathered + beside + 77 + scattered


def test_a_sum_of_products_is_a_product_and_a_sum_alone_is_not():
    module = parse(
        """
ENTRY %main (a: bf16[5,64], b: bf16[5,64]) -> f32[5] {
  %a = bf16[5,64]{1,0} parameter(0)
  %b = bf16[5,64]{1,0} parameter(1)
  %m = bf16[5,64]{1,0} multiply(%a, %b)
  %w = f32[5,64]{1,0} convert(%m)
  %z = f32[] constant(0)
  %r = f32[5]{0} reduce(%w, %z), dimensions={1}, to_apply=%add
  %c = f32[5,64]{1,0} convert(%a)
  ROOT %s = f32[5]{0} reduce(%c, %z), dimensions={1}, to_apply=%add
}
"""
    )
    assert count_costs(module, count_runs(module), devices=1).flops == 2 * 5 * 64


def test_an_array_that_a_fusion_in_a_fusion_hands_on_is_read():
    module = parse(
        """
%reshaped (i: bf16[64,32]) -> bf16[32,64] {
  %i = bf16[64,32]{1,0} parameter(0)
  ROOT %b = bf16[32,64]{1,0} bitcast(%i)
}

%product (p: bf16[64,32], q: bf16[5,32]) -> f32[5,64] {
  %p = bf16[64,32]{1,0} parameter(0)
  %q = bf16[5,32]{1,0} parameter(1)
  %f = bf16[32,64]{1,0} fusion(%p), kind=kLoop, calls=%reshaped
  ROOT %d = f32[5,64]{1,0} dot(%q, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (w: bf16[64,32], x: bf16[5,32]) -> f32[5,64] {
  %w = bf16[64,32]{1,0} parameter(0)
  %x = bf16[5,32]{1,0} parameter(1)
  ROOT %y = f32[5,64]{1,0} fusion(%w, %x), kind=kOutput, calls=%product
}
"""
    )
    costs = count_costs(module, count_runs(module), devices=1)
    assert costs.hbm_bytes == 64 * 32 * 2 + 5 * 32 * 2 + 5 * 64 * 4
