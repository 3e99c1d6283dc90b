"""`qwen35 plan`: what a model costs, in closed form and as compiled for TPUs that are not there."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from qwen35_jax.checkpoint.model_name import find_config
from qwen35_jax.cli.options import add_dtype_option, add_json_option
from qwen35_jax.errors import ConfigError
from qwen35_jax.spec.closed_form import ClosedForm, closed_form

if TYPE_CHECKING:
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.planning.compiling import CompiledPlan, TooLarge
    from qwen35_jax.planning.topologies import Topology

HELP = (
    "Print what a model keeps and multiplies per token. With --topology, also compile its true program for such a "
    "slice of TPUs, without having one, and print what it takes of each device: prefill and decoding, or with --train "
    "a training step. Compiling takes minutes, and the tpu extra. Exit status 1 if the program does not fit."
)

DOES_NOT_FIT = 1
OPTIMIZERS = ("adamw", "muon", "adafactor")
DEFAULT_CONTEXT = 32_768
DEFAULT_ROW_LENGTH = 2048


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="nano",
        metavar="M",
        help="a published name such as Qwen/Qwen3.8-27B, a config.json or the folder that holds one, another model's "
        "hub id, or `nano`, the built-in model (default); no weights are read",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows of the cache (default 1)")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens that each row of the cache has room for (default {DEFAULT_CONTEXT:,}, or the model's own context "
        "where that is shorter)",
    )
    parser.add_argument("--topology", metavar="T", help="a slice of TPUs, such as v5e:4x4 or v5p:4x4x4")
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help="how its devices are used, such as fsdp=4,tensor=4 (default: to train most in fsdp, to answer most "
        "in tensor)",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--train", action="store_true", help="a training step instead of answering")
    training.add_argument(
        "--rows", type=int, metavar="N", help="rows of a step (default: one for each device that shares none)"
    )
    training.add_argument(
        "--row-length", type=int, metavar="N", help=f"tokens of each row (default {DEFAULT_ROW_LENGTH:,})"
    )
    training.add_argument(
        "--lora-rank", type=int, metavar="R", help="train a LoRA adapter of this rank, not all parameters"
    )
    training.add_argument("--optimizer", choices=OPTIMIZERS, help="default adamw")
    add_dtype_option(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    config = find_config(args.model)
    dtype = args.dtype if args.dtype != "auto" else config.dtype or "bfloat16"
    context = args.context or min(DEFAULT_CONTEXT, config.text.max_context)
    counts = closed_form(config, context=context, batch=args.batch, dtype=dtype)
    compiled = _compiled(args, config, context, dtype) if args.topology is not None else None
    if args.json:
        print(json.dumps({"name": args.model, "dtype": dtype, **counts.to_json(), **(compiled or {})}))
    else:
        console = Console()
        _print_closed_form(console, args.model, dtype, counts)
        if compiled is not None:
            _print_compiled(console, compiled)
        else:
            console.print("\nWith --topology, such as v5e:4x4, the program itself is compiled and measured.")
    return DOES_NOT_FIT if compiled is not None and not compiled["fits"] else 0


def _check(args: argparse.Namespace) -> None:
    for name in ("batch", "context", "rows", "row_length", "lora_rank"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, expected a whole number of at least 1")
    if args.topology is None:
        needing = ("train", "mesh", "rows", "row_length", "lora_rank", "optimizer")
        given = [name for name in needing if getattr(args, name)]
        if given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')} is about a compiled program: add --topology, such as v5e:4x4"
            )
    elif not args.train:
        given = [name for name in ("rows", "row_length", "lora_rank", "optimizer") if getattr(args, name)]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} is about training: add --train")
    elif args.dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"--dtype is {args.dtype}: a training step is planned in bfloat16, leave it out")


def _compiled(args: argparse.Namespace, config: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """The compiled part of the report."""
    _use_no_tpu()
    from qwen35_jax.planning.topologies import can_compile, parse_mesh, parse_topology

    topology = parse_topology(args.topology)
    mesh = None if args.mesh is None else parse_mesh(args.mesh, topology)
    if config.text.moe is not None:
        raise ConfigError(
            f"'{args.model}' is a mixture of experts: running those is planned, and so is compiling them; leave out "
            "--topology for the closed form"
        )
    if not can_compile():
        raise ConfigError(
            "--topology needs the TPU compiler, which is not installed: pip install 'qwen35-jax[tpu]' (Linux on "
            "x86-64; no TPU is needed), or leave it out for the closed form"
        )
    head = {"topology": topology.name, "devices": topology.devices}
    if args.train:
        from qwen35_jax.planning.train_plan import plan_training, training_mesh

        plan = plan_training(
            config,
            topology,
            mesh or training_mesh(config, topology),
            rows=args.rows,
            row_length=args.row_length or min(DEFAULT_ROW_LENGTH, config.text.max_context),
            lora_rank=args.lora_rank,
            optimizer=args.optimizer or "adamw",
        )
        kept = {
            "weights_bytes": plan.weights_bytes,
            "optimizer_bytes": plan.optimizer_bytes,
            "cache_bytes": 0,
        }
        step = _program(plan.compiled, topology, kept)
        return {
            **head,
            "mesh": dict(plan.mesh),
            "program": "training step",
            "rows": plan.rows,
            "row_length": plan.row_length,
            "lora_rank": args.lora_rank,
            **step,
        }
    from qwen35_jax.planning.inference_plan import inference_mesh, plan_inference

    mesh = mesh or inference_mesh(config, topology)
    plan = plan_inference(config, topology, mesh, batch=args.batch, context=context, dtype=dtype)
    kept = {"weights_bytes": plan.weights_bytes, "cache_bytes": plan.cache_bytes}
    prefill, decode = (_program(each, topology, kept) for each in (plan.prefill, plan.decode))
    return {
        **head,
        "mesh": dict(plan.mesh),
        "program": "decoding step",
        **decode,
        "prefill": {"tokens": plan.piece, **prefill},
        "fits": prefill["fits"] and decode["fits"],
    }


def _use_no_tpu() -> None:
    """Keeps this process to the CPU: it takes no TPU that is there from others, and does not search for one."""
    import jax

    with contextlib.suppress(RuntimeError):  # JAX has begun already, with the devices that it found then
        jax.config.update("jax_platforms", "cpu")


def _program(compiled: CompiledPlan | TooLarge, topology: Topology, kept: dict[str, int]) -> dict[str, Any]:
    """One program for the report. `kept` are bytes that stay on a device between its runs."""
    from qwen35_jax.planning.compiling import TooLarge

    if isinstance(compiled, TooLarge):
        return {
            "fits": False,
            "device": {**kept, "peak_bytes": compiled.needed, "capacity_bytes": compiled.available},
            "compile_seconds": compiled.compile_seconds,
        }
    memory, costs, roofline = compiled.memory, compiled.costs, compiled.roofline
    return {
        "fits": True,
        "device": {
            **kept,
            "argument_bytes": memory.arguments,
            "output_bytes": memory.outputs,
            "temporary_bytes": memory.temporaries,
            "program_bytes": memory.program,
            "peak_bytes": memory.peak,
            "capacity_bytes": topology.chip.hbm_bytes,
            "flops": costs.flops,
            "matrix_flops": costs.matrix_flops,
            "hbm_bytes": costs.hbm_bytes,
            "sent_bytes": costs.sent_bytes,
            "compute_seconds": roofline.compute,
            "memory_seconds": roofline.memory,
            "interconnect_seconds": roofline.interconnect,
            "roofline_seconds": roofline.seconds,
            "bound_by": roofline.bound_by,
            "loops_of_unknown_length": costs.unknown_loops,
        },
        "collectives": [
            {"kind": each.kind, "devices": each.group, "count": each.count, "bytes": each.nbytes}
            for each in costs.collectives
        ],
        "compile_seconds": compiled.compile_seconds,
    }


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("what")
    table.add_column("value", justify="right")
    table.show_header = False
    for row in rows:
        table.add_row(*row)
    return table


def _print_closed_form(console: Console, name: str, dtype: str, counts: ClosedForm) -> None:
    rows = [(part.replace("_", " "), f"{count:,}") for part, count in counts.parameters.items() if count]
    rows.append(("text model", f"{counts.text_parameters:,}"))
    if counts.active_parameters != counts.text_parameters:
        rows.append(("of it active per token", f"{counts.active_parameters:,}"))
    console.print(name, style="bold", markup=False, highlight=False)
    console.print(_table("\nParameters", rows))
    linear, full = counts.layers["linear_attention"], counts.layers["full_attention"]
    console.print(
        _table(
            "\nMemory",
            [
                (f"numbers per token, in {full} attention layers", f"{counts.numbers_per_token:,}"),
                (
                    f"numbers in tables, {counts.tables_per_layer} in each of {linear} DeltaNet layers",
                    f"{counts.table_numbers:,}",
                ),
                ("fixed numbers, tables and windows", f"{counts.fixed_numbers:,}"),
                (
                    "tokens from which on a table layer keeps less than an attention layer",
                    "none" if counts.crossing_tokens is None else f"{counts.crossing_tokens:,}",
                ),
                (
                    f"cache of {counts.batch:,} x {counts.context:,} tokens, {dtype}",
                    _size(counts.cache_bytes),
                ),
                ("the same if all layers were attention", _size(counts.pure_attention_cache_bytes)),
            ],
        )
    )
    console.print(
        _table(
            "\nMultiplications per token",
            [
                ("with weights", f"{counts.weight_multiplications:,}"),
                ("with tables", f"{counts.table_multiplications:,}"),
                ("for each earlier token", f"{counts.per_earlier_token:,}"),
            ],
        )
    )


def _print_compiled(console: Console, report: dict[str, Any]) -> None:
    axes = ", ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
    console.print(
        f"\n{report['topology']}: {report['devices']} chips, mesh {axes}", style="bold", highlight=False
    )
    if report["program"] == "training step":
        _print_program(
            console, f"training step, {report['rows']:,} rows of {report['row_length']:,} tokens", report
        )
    else:
        prefill = report["prefill"]
        _print_program(console, f"prefill of {prefill['tokens']:,} tokens of each row", prefill)
        _print_program(console, "decoding step", report)


def _print_program(console: Console, title: str, report: dict[str, Any]) -> None:
    device = report["device"]
    if not report["fits"]:
        console.print(
            f"\n{title}: does not fit: needs {_size(device['peak_bytes'])} of "
            f"{_size(device['capacity_bytes'])} on each device",
            style="bold red",
            highlight=False,
            soft_wrap=True,
        )
        return
    names = {
        "weights_bytes": "weights",
        "optimizer_bytes": "optimizer",
        "cache_bytes": "cache",
        "temporary_bytes": "temporaries",
        "output_bytes": "outputs",
        "program_bytes": "program",
    }
    rows = [(name, _size(device[field])) for field, name in names.items() if device.get(field)]
    rows += [
        ("peak", f"{_size(device['peak_bytes'])} of {_size(device['capacity_bytes'])}: fits"),
        ("floating-point operations", f"{device['flops']:.4g}"),
        ("traffic with main memory", _size(device["hbm_bytes"])),
        ("sent to other devices", _size(device["sent_bytes"])),
        ("least time by compute", f"{device['compute_seconds']:.4g} s"),
        ("least time by memory", f"{device['memory_seconds']:.4g} s"),
        ("least time by interconnect", f"{device['interconnect_seconds']:.4g} s"),
        ("bound by", device["bound_by"]),
        ("compiled in", f"{report['compile_seconds']:.0f} s"),
    ]
    console.print(_table(f"\n{title}, on each device", rows))
    collectives = [
        (f"{each['count']:,} {each['kind']} of {each['devices']} devices", _size(each["bytes"]))
        for each in report["collectives"]
    ]
    if collectives:
        console.print(_table("\nCollectives, and what a device sends for them", collectives))


def _size(count: int) -> str:
    unit, size = next(
        ((unit, size) for unit, size in (("GiB", 2**30), ("MiB", 2**20)) if count >= size), ("KiB", 2**10)
    )
    return f"{count / size:,.3f} {unit}"
