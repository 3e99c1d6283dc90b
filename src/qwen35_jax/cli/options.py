"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_jax.errors import PromptError

if TYPE_CHECKING:
    from qwen35_jax.checkpoint.progress import Advance
    from qwen35_jax.checkpoint.source import LoadedModel
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.inference.settings import GenerationSettings
    from qwen35_jax.inference.speculation import Speculation

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


def add_generation_options(parser: argparse.ArgumentParser, *, default_new_tokens: int) -> None:
    """Adds what `generation_settings` and `speculation` read: lengths, sampling, drafts, endings."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"tokens to generate at most (default {default_new_tokens})",
    )
    parser.add_argument("--min-new-tokens", type=int, metavar="N", help="draw no stop token before N tokens")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    sampling.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely; 0 is off")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the fewest tokens of total probability P"
    )
    sampling.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens less likely than P times the most likely"
    )
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 discourages tokens seen before"
    )
    sampling.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtracted from logits of tokens in the answer"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="repeat the same draws")
    add_speculation_option(parser)
    ending = parser.add_argument_group("ending")
    ending.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    ending.add_argument("--ignore-eos", action="store_true", help="go on after stop tokens, to the length")


def add_speculation_option(parser: argparse._ActionsContainer) -> None:
    """Adds `--speculate`, which `speculation` reads, to a command or a group of its options."""
    parser.add_argument(
        "--speculate",
        type=int,
        metavar="N",
        help="let the checkpoint's multi-token-prediction head draft N tokens (1 to 4) for each pass of the model: "
        "the same answer in fewer passes",
    )


def generation_settings(args: argparse.Namespace, folder: Path) -> GenerationSettings:
    """What the checkpoint recommends, with what the command line says on top."""
    from qwen35_jax.inference.settings import recommended_settings

    return recommended_settings(
        folder,
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def speculation(args: argparse.Namespace, config: ModelConfig) -> Speculation | None:
    """What `--speculate` asks for.

    Raises:
        PromptError: more drafts than there may be, or the model has no head for them.
    """
    from qwen35_jax.inference.speculation import Speculation

    if args.speculate is None:
        return None
    if not config.text.mtp_num_hidden_layers:
        raise PromptError(
            f"--speculate {args.speculate}: '{args.model}' has no multi-token-prediction head; leave it out"
        )
    return Speculation(args.speculate)


def loading_progress(title: str, nbytes: int) -> AbstractContextManager[Advance]:
    """A bar on a terminal, for models that take long to read."""
    from qwen35_jax.checkpoint.progress import progress_bar, quiet

    takes_long = nbytes > 200e6 and sys.stderr.isatty()
    return (progress_bar if takes_long else quiet)(title, nbytes)


def load_model(args: argparse.Namespace, folder: Path, *, mtp: bool) -> LoadedModel:
    """The model of `--model` in the precision of `--dtype`.

    Args:
        args: of the command line.
        folder: that `--model` stands for.
        mtp: with the multi-token-prediction head.
    """
    from qwen35_jax.checkpoint import load

    return load(folder, dtype=args.dtype, parameter_dtype=args.dtype, mtp=mtp, progress=loading_progress)


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
