"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

DTYPES = ("auto", "bfloat16", "float32", "float64")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and `--dtype`."""
    parser.add_argument(
        "--model",
        default="nano",
        metavar="M",
        help="a folder in Hugging Face layout, an Orbax folder made by `qwen35 convert`, a hub id, "
        "or `nano`, the built-in model (default)",
    )
    add_dtype_option(parser)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--dtype`, the precision of the computation, to a command that names its model otherwise."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="precision of the computation; auto takes the checkpoint's own, bfloat16 or float32 (default)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`: exactly one JSON object on standard output."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; logs stay on standard error"
    )


@contextlib.contextmanager
def precision(args: argparse.Namespace) -> Iterator[None]:
    """Turns JAX's 64-bit types on while a command runs with `--dtype float64`.

    JAX decides on this when an array is made, so it has to happen before the command touches any. The
    setting is for all threads, and put back afterwards for the sake of callers within one process.
    """
    if getattr(args, "dtype", "auto") != "float64":
        yield
        return
    import jax

    before = bool(jax.config.read("jax_enable_x64"))
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
