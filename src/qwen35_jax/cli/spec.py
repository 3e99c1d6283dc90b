"""`qwen35 spec`: what a model computes and how large it is, without its weights."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qwen35_jax.checkpoint.model_name import find_config
from qwen35_jax.cli.options import add_dtype_option, add_json_option
from qwen35_jax.layer_groups import layer_groups
from qwen35_jax.spec import Node, Specification, specify
from qwen35_jax.spec.tensors import VISION_PREFIX, text_prefix

HELP = "Print a model's graph, tensor shapes and parameter counts. No weights are read."

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
PART_TITLES = {
    "embedding": "embedding",
    "norms": "norms between layers",
    "gated_delta_net": "Gated DeltaNet",
    "attention": "gated attention",
    "mlp": "feed-forward",
    "lm_head": "output head",
    "mtp": "multi-token prediction",
    "vision": "vision tower",
}
KIND_TITLES = {"linear_attention": "DeltaNet", "full_attention": "attention"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default="nano",
        metavar="NAME_OR_PATH",
        help="a published name such as Qwen/Qwen3.8-27B, a config.json or the folder that holds one, another "
        "model's hub id, or `nano`, the built-in model (default)",
    )
    add_dtype_option(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    specification = specify(find_config(args.name))
    dtype = args.dtype if args.dtype != "auto" else specification.config.dtype or "bfloat16"
    if args.json:
        weights = sum(specification.by_part.values()) * BYTES[dtype]
        print(
            json.dumps(
                {"name": args.name, "dtype": dtype, "weights_bytes": weights, **specification.to_json()}
            )
        )
    else:
        print_specification(Console(), args.name, dtype, specification)
    return 0


def print_specification(console: Console, name: str, dtype: str, specification: Specification) -> None:
    """Prints the summary, the graph and what each node computes, for people."""
    _print_summary(console, name, specification)
    console.print(_parameter_table(specification, dtype))
    console.print(_graph_table(specification))
    console.print(_formula_table(specification))
    console.print()
    console.print(
        "u: a node's input, W: its matrix, w: its vector, x: the residual stream, E: the embedding table. "
        "rms(x) = x / sqrt(mean(x^2) + eps), l2(x) = x / sqrt(sum(x^2) + l2_eps). "
        f"Tensor names without {text_prefix(specification.config)}; {{layer}} is each layer's index.",
        markup=False,
        highlight=False,
        style="dim",
    )


def _print_summary(console: Console, name: str, specification: Specification) -> None:
    text = specification.config.text
    console.print(Text(name, style="bold"))
    groups = ", then ".join(
        f"{group.repeats} x ({', '.join(KIND_TITLES[kind] for kind in group.pattern)})"
        for group in layer_groups(text)
    )
    lines = [
        f"{specification.config.model_type}, {text.num_hidden_layers} layers: {groups}",
        f"{specification.text_parameters:,} text parameters"
        + ("" if text.moe is None else f", {specification.active_parameters:,} active per token"),
        f"hidden size {text.hidden_size:,}, vocabulary {text.vocab_size:,}, "
        f"context {text.max_context:,} tokens",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )


def _parameter_table(specification: Specification, dtype: str) -> Table:
    table = _table("\nParameters")
    table.add_column("part")
    table.add_column("parameters", justify="right")
    table.add_column("of the whole", justify="right")
    table.add_column(f"{dtype} GiB", justify="right")
    whole = sum(specification.by_part.values())

    def row(title: str, count: int, style: str = "") -> None:
        gib = count * BYTES[dtype] / 2**30
        table.add_row(title, f"{count:,}", f"{count / whole:.1%}", f"{gib:,.2f}", style=style)

    for part, count in specification.by_part.items():
        if count:
            row(PART_TITLES[part], count)
    if specification.config.tie_word_embeddings:
        table.add_row("output head", "tied", "", "")
    row("text model", specification.text_parameters, "bold")
    row("all", whole, "bold")
    return table


def _graph_table(specification: Specification) -> Table:
    table = _table("\nGraph")
    table.add_column("node", no_wrap=True)
    table.add_column("operation")
    table.add_column("layers", justify="right")
    table.add_column("maps")
    table.add_column("parameters", justify="right", no_wrap=True)
    for node in specification.nodes:
        table.add_row(
            node.name,
            node.op,
            str(len(node.layers)) if node.layers else "",
            node.maps,
            f"{node.parameters:,}" if node.parameters else "",
        )
    return table


def _formula_table(specification: Specification) -> Table:
    table = _table("\nWhat each node computes")
    table.add_column("node", no_wrap=True)
    table.add_column("formula, constants, tensors", overflow="fold")
    prefix = text_prefix(specification.config)
    for node in specification.nodes:
        table.add_row(node.name, _details(node, prefix))
    return table


def _details(node: Node, prefix: str) -> Text:
    lines = [Text(step) for step in node.formula.split("; ")]
    if node.constants:
        constants = ", ".join(f"{name} {_number(value)}" for name, value in node.constants.items())
        lines.append(Text(constants, style="cyan"))
    for name, shape in node.tensors.items():
        short = name if name.startswith(VISION_PREFIX) else name.removeprefix(prefix)
        lines.append(Text(f"{short} {list(shape)}", style="dim"))
    return Text("\n").join(lines)


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
