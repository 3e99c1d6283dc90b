"""`qwen35 verify`: runs this implementation beside the official one and prints the error of every node."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from qwen35_jax.checkpoint.model_name import find_config, find_model
from qwen35_jax.cli.options import DTYPES, add_json_option
from qwen35_jax.verify import require_reference
from qwen35_jax.verify.report import BOUNDS, Bounds, Report

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "Compare a model with the official implementation (transformers, in float64) on the same weights and tokens: "
    "every node fed with the reference's inputs, and the whole model by itself, in prefill, chunked prefill and "
    "decoding. Exit status 1 when an error is above its bound."
)

FAILED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="nano",
        metavar="MODEL",
        help="a folder in Hugging Face layout, a hub id, or `nano`, the built-in model (default); "
        "with --reduced also a published name such as Qwen/Qwen3.8-27B",
    )
    parser.add_argument(
        "--reduced",
        action="store_true",
        help="random weights in a narrow model with MODEL's layers and head ratios; reads no weights",
    )
    parser.add_argument(
        "--draws",
        type=_positive_integer,
        default=2,
        metavar="N",
        help="with --reduced: how many times weights are drawn (default 2)",
    )
    parser.add_argument(
        "--dtype",
        type=lambda name: "float64" if name == "auto" else name,
        choices=DTYPES,
        default="float64",
        help="precision of this implementation; the official one always runs in float64 (default: float64)",
    )
    parser.add_argument(
        "--bound",
        type=_positive_number,
        metavar="X",
        help="largest relative error of a node (default 4.1e-14 in float64, 1e-5 in float32, 5e-2 in bfloat16)",
    )
    parser.add_argument(
        "--end-to-end-bound",
        type=_positive_number,
        metavar="X",
        help="largest relative error of the whole model (default 1e-12, 1e-3, 5e-1)",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    require_reference()
    # Only now: these bring PyTorch.
    import transformers

    from qwen35_jax.verify.run import verify_checkpoint, verify_reduced

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    default = BOUNDS[args.dtype]
    bounds = Bounds(args.bound or default.node, args.end_to_end_bound or default.end_to_end)
    if args.reduced:
        config = find_config(args.model)
        report = verify_reduced(config, dtype=args.dtype, bounds=bounds, draws=args.draws, progress=_log)
    else:
        folder = find_model(args.model)
        report = verify_checkpoint(folder, dtype=args.dtype, bounds=bounds, progress=_log)
    if args.json:
        print(json.dumps({"model": args.model, "reduced": args.reduced, **report.to_json()}))
    else:
        from rich.console import Console

        print_report(Console(), args.model, report)
    return 0 if report.passed else FAILED


def print_report(console: Console, model: str, report: Report) -> None:
    """The errors as two tables, and a verdict."""
    from rich.table import Table

    def table(title: str, errors: dict[str, float], bound: float) -> Table:
        rows = Table(title=title, title_justify="left")
        rows.add_column("node" if "fed" in title else "value")
        rows.add_column("relative error", justify="right")
        rows.add_column("of the bound", justify="right")
        for name, error in errors.items():
            style = None if error <= bound else "bold red"
            rows.add_row(name, f"{error:.1e}", f"{error / bound:.1%}", style=style)
        return rows

    errors, bounds = report.errors, report.bounds
    console.print(
        table("Each node, fed with the reference's inputs (worst layer)", errors.nodes, bounds.node)
    )
    console.print(table("The whole model by itself", errors.end_to_end, bounds.end_to_end))
    verdict = "[green]equal[/green]" if report.passed else "[bold red]NOT equal[/bold red]"
    console.print(
        f"{model} in {report.dtype}: {verdict}. Worst node {errors.worst_node:.1e} (bound {bounds.node:.1e}), "
        f"end to end {errors.worst_end_to_end:.1e} (bound {bounds.end_to_end:.1e}); "
        f"prefill of {' and '.join(map(str, report.lengths))} tokens, weight draws: {report.draws}."
    )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of at least 1")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number above 0")
    return value
