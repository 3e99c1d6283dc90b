"""`qwen35 plan`: the JSON that other tools read, and refusals before anything is compiled."""

from __future__ import annotations

import json

import pytest

from qwen35_jax.chips import GIB
from qwen35_jax.cli import main as cli
from qwen35_jax.planning import topologies, train_plan
from qwen35_jax.planning.compiling import CompiledPlan, Memory, TooLarge, out_of_memory, roofline
from qwen35_jax.planning.costs import Collective, Costs
from qwen35_jax.planning.topologies import parse_topology
from tests.config_files import flat, moe_section

V5E = parse_topology("v5e:2x2")


def plan(capsys, *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refusal(capsys, *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_json_of_the_closed_form(capsys):
    told = json.loads(plan(capsys, "--model", "Qwen/Qwen3.8-27B", "--json"))
    assert told["numbers_per_token"] == 32_768
    assert told["fixed_numbers"] == 39_223_296
    assert told["table_numbers"] == 37_748_736
    assert told["multiplications"] == {
        "weights": 25_624_600_064,
        "tables": 150_994_944,
        "per_earlier_token": 196_608,
    }
    assert told["crossing_tokens"] == 384
    assert told["context"] == 32_768
    assert told["pure_attention_cache_bytes"] == 8 * GIB
    assert told["cache_bytes"] == 2 * GIB + 4 * 37_748_736 + 2 * (39_223_296 - 37_748_736)
    assert "device" not in told


def test_batch_context_and_dtype_decide_the_cache(capsys):
    options = ("--batch", "3", "--context", "1000", "--dtype", "float32", "--json")
    told = json.loads(plan(capsys, "--model", "Qwen/Qwen3.5-0.8B", *options))
    assert told["cache_bytes"] == 3 * 4 * (6_144 * 1000 + 5_050_368)
    assert told["dtype"] == "float32"


def test_the_built_in_model_is_planned_for_its_own_context(capsys):
    told = json.loads(plan(capsys, "--json"))
    assert told["context"] < 32_768


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-122B-A10B"])
def test_the_tables_show_every_count(capsys, name):
    told = json.loads(plan(capsys, "--model", name, "--json"))
    shown = plan(capsys, "--model", name)
    for count in (
        told["numbers_per_token"],
        told["fixed_numbers"],
        told["table_numbers"],
        told["crossing_tokens"],
        told["parameters"]["text"],
        told["parameters"]["active"],
        *told["multiplications"].values(),
        *(count for count in told["parameters"]["by_part"].values() if count),
    ):
        assert f"{count:,}" in shown


REFUSALS = {
    "an unknown slice": (("--topology", "h100:8"), "expected a generation of"),
    "a mesh of another size": (("--topology", "v5e:2x2", "--mesh", "fsdp=8"), "expected the 4 of v5e:2x2"),
    "a mesh without a slice": (("--mesh", "fsdp=8"), "add --topology"),
    "training without a slice": (("--train",), "add --topology"),
    "rows without training": (("--topology", "v5e:2x2", "--rows", "4"), "--rows is about training"),
    "no rows": (("--topology", "v5e:2x2", "--train", "--rows", "0"), "--rows is 0"),
    "no context": (("--context", "-1"), "--context is -1"),
    "a training step in float32": (("--topology", "v5e:2x2", "--train", "--dtype", "float32"), "planned in bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_planned_is_refused_in_one_line(capsys, case):
    arguments, told = REFUSALS[case]
    assert told in refusal(capsys, *arguments)


def test_without_the_compiler_a_slice_is_refused_with_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(topologies, "can_compile", lambda: False)
    told = refusal(capsys, "--model", "Qwen/Qwen3.5-0.8B", "--topology", "v5e:2x2")
    assert "pip install 'qwen35-jax[tpu]'" in told
    assert "leave it out for the closed form" in told


def test_a_mixture_of_experts_is_told_to_be_planned(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(flat(moe_section())))
    assert "mixture of experts" in refusal(capsys, "--model", str(path), "--topology", "v5e:2x2")
    assert "closed form" in refusal(capsys, "--model", "Qwen/Qwen3.5-35B-A3B", "--topology", "v5e:2x2")


MISFITS = {
    "heads over a tensor axis": (("--mesh", "tensor=16"), "mesh: 8 heads do not divide over 16 devices"),
    "rows over devices": (("--rows", "25"), "rows of a step are 25, expected a multiple of the 8 devices"),
    "rows longer than the context": (("--row-length", "999999999"), "the context of the model"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_mesh_that_does_not_fit_the_model_is_refused_before_the_compiler_is_loaded(
    capsys, monkeypatch, case
):
    def loaded(*arguments):
        raise AssertionError("the compiler was loaded")

    monkeypatch.setattr(topologies, "can_compile", lambda: True)
    monkeypatch.setattr(train_plan, "make_mesh", loaded)
    arguments, told = MISFITS[case]
    options = ("--model", "Qwen/Qwen3.5-0.8B", "--topology", "v5e:4x4", "--train", *arguments)
    assert told in refusal(capsys, *options)


COSTS = Costs(
    flops=3_000_000_000_000,
    matrix_flops=4_000_000_000_000,
    hbm_bytes=5_000_000_000,
    collectives=(Collective("all-gather", 4, 7, 6_000_000_000),),
    unknown_loops=0,
)
FITTING = CompiledPlan(
    Memory(arguments=5 * GIB, outputs=0, temporaries=2 * GIB, program=GIB), COSTS, roofline(COSTS, V5E), 12.5
)


def with_a_compiler(monkeypatch, outcome):
    """A plan whose compiler says this: what the command makes of it, without the minutes that compiling takes."""
    monkeypatch.setattr(topologies, "can_compile", lambda: True)
    monkeypatch.setattr(
        train_plan,
        "plan_training",
        lambda config, topology, mesh, *, rows, row_length, lora_rank, optimizer: train_plan.TrainPlan(
            mesh, rows or 4, row_length, 3 * GIB, 2 * GIB, outcome
        ),
    )


TRAINING = ("--model", "Qwen/Qwen3.5-0.8B", "--topology", "v5e:2x2", "--train")


def test_a_compiled_step_is_told_by_device(capsys, monkeypatch):
    with_a_compiler(monkeypatch, FITTING)
    told = json.loads(plan(capsys, *TRAINING, "--json"))
    assert told["fits"] is True
    assert told["mesh"] == {"fsdp": 4}
    assert (told["rows"], told["row_length"]) == (4, 2048)
    device = told["device"]
    assert device["weights_bytes"] == 3 * GIB
    assert device["optimizer_bytes"] == device["temporary_bytes"] == 2 * GIB
    assert device["cache_bytes"] == 0
    assert device["peak_bytes"] == 8 * GIB
    assert device["capacity_bytes"] == 16 * GIB
    assert device["flops"] == 3_000_000_000_000
    assert device["hbm_bytes"] == 5_000_000_000
    assert device["bound_by"] == "interconnect"
    assert device["roofline_seconds"] == 6e9 / (4 * 4.5e10)
    assert device["compute_seconds"] == 4e12 / 1.97e14
    assert device["memory_seconds"] == 5e9 / 8.2e11
    assert told["collectives"] == [{"kind": "all-gather", "devices": 4, "count": 7, "bytes": 6_000_000_000}]
    assert told["compile_seconds"] == 12.5
    assert told["numbers_per_token"] == 6_144


def test_a_compiled_step_is_shown_in_tables(capsys, monkeypatch):
    with_a_compiler(monkeypatch, FITTING)
    shown = plan(capsys, *TRAINING)
    for part in (
        "v5e:2x2: 4 chips, mesh fsdp 4",
        "8.000 GiB of 16.000 GiB: fits",
        "7 all-gather of 4 devices",
        "interconnect",
    ):
        assert part in shown


def test_a_step_that_does_not_fit_is_told_with_what_it_needs_and_status_1(capsys, monkeypatch):
    with_a_compiler(monkeypatch, TooLarge(40 * GIB, 16 * GIB, 3.0))
    assert cli.main(["plan", *TRAINING, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert (told["device"]["peak_bytes"], told["device"]["capacity_bytes"]) == (40 * GIB, 16 * GIB)
    assert cli.main(["plan", *TRAINING]) == 1
    assert "does not fit: needs 40.000 GiB of 16.000 GiB" in capsys.readouterr().out


def test_the_compiler_s_complaint_is_read():
    complaint = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 33.50G of "
        "15.75G hbm. Exceeded hbm capacity by 17.75G."
    )
    assert out_of_memory(complaint) == (int(33.5 * GIB), int(15.75 * GIB))
    other = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (48.00G) exceeds "
        "available HBM (15.75G)."
    )
    assert out_of_memory(other) == (48 * GIB, int(15.75 * GIB))
    assert out_of_memory("INTERNAL: something else") is None
    assert out_of_memory("Used 900.0M of 15.75G hbm") == (900 * 2**20, int(15.75 * GIB))
