"""`qwen35 convert`: a Hugging Face checkpoint becomes an Orbax one."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from qwen35_jax.cli.options import add_json_option

HELP = (
    "Turn a checkpoint in Hugging Face layout into an Orbax folder, which loads straight onto a mesh. No tensor is"
    " lost: those that the text model does not use are kept, and `qwen35 export` writes all of them again."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a folder in Hugging Face layout, a hub id, or `nano`")
    parser.add_argument("destination", metavar="DST", type=Path, help="the folder to make")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from qwen35_jax.checkpoint.progress import progress_bar
    from qwen35_jax.checkpoint.source import convert

    start = time.perf_counter()
    convert(args.source, args.destination, progress=progress_bar)
    report(args, time.perf_counter() - start)
    return 0


def report(args: argparse.Namespace, seconds: float) -> None:
    """Say what was written: one line for people, or one JSON object."""
    nbytes = sum(path.stat().st_size for path in args.destination.rglob("*") if path.is_file())
    if args.json:
        print(json.dumps({"destination": str(args.destination), "bytes": nbytes, "seconds": seconds}))
    else:
        print(f"wrote {args.destination}: {nbytes / 1e6:,.1f} MB in {seconds:.1f} s")
