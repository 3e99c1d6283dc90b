"""`qwen35 export`: any checkpoint is written in Hugging Face layout."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from qwen35_jax.cli.convert import report
from qwen35_jax.cli.options import add_json_option

HELP = (
    "Write a checkpoint in Hugging Face layout. One that was converted from this layout comes back byte for byte:"
    " weights (unless --max-shard-size asks for other shards), settings, tokenizer, chat template, license and card."
)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a folder (Orbax or Hugging Face), a hub id, or `nano`")
    parser.add_argument("destination", metavar="DST", type=Path, help="the folder to make")
    parser.add_argument(
        "--max-shard-size",
        type=shard_size,
        metavar="SIZE",
        help="cut the weights anew into files of at most this size, for instance 5GB or 200MB",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from qwen35_jax.checkpoint.progress import progress_bar
    from qwen35_jax.checkpoint.source import export

    start = time.perf_counter()
    export(args.source, args.destination, max_shard_bytes=args.max_shard_size, progress=progress_bar)
    report(args, time.perf_counter() - start)
    return 0


def shard_size(text: str) -> int:
    """A number of bytes from a text such as 5GB (units of 1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B?)", text.strip(), re.IGNORECASE)
    unit = None if match is None else match[2].upper()
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for instance 5GB, 200MB or 1000000")
    return int(float(match[1]) * _UNITS[unit])
