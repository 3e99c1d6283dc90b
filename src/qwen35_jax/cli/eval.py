"""`qwen35 eval`: the perplexity of a text."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_jax.cli.options import add_json_option, add_model_options, load_model
from qwen35_jax.errors import PromptError

if TYPE_CHECKING:
    from qwen35_jax.inference.perplexity import Perplexity
    from qwen35_jax.inference.scoring import TokenScores

HELP = (
    "Measure how well a model predicts a text: perplexity, and bits per byte, which compares models with different "
    "tokenizers. The text is read in windows that slide along it; every token but the first is scored once. A window "
    "starts with an empty memory, so a smaller stride gives each token more of the text before it and takes longer; "
    "where the window is as long as the text, all of it is read in one pass."
)
DEFAULT_WINDOW = 2048


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument(
        "--text",
        required=True,
        metavar="FILE",
        help="a UTF-8 text file; - reads standard input. Names of special tokens in it stand for those tokens",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens that the model reads at a time (default {DEFAULT_WINDOW}, or the model's context where that "
        "is less)",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens from the start of a window to the next (default half a window)",
    )
    parser.add_argument(
        "--batch", type=int, default=4, metavar="N", help="windows that run side by side (default 4)"
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.batch < 1:
        raise PromptError(f"--batch is {args.batch}, expected at least 1")
    name = "standard input" if args.text == "-" else args.text
    text = _read(args.text, name)

    # From here on JAX is loaded. What is cheap to check is checked before the weights are read.
    from qwen35_jax.checkpoint.model_name import find_model
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.inference.compilation_cache import enable_compilation_cache
    from qwen35_jax.inference.perplexity import check_windows, perplexity
    from qwen35_jax.inference.tokenizer import Tokenizer

    enable_compilation_cache()
    folder = find_model(args.model)
    context = ModelConfig.from_hf(folder).text.max_context
    tokenizer = Tokenizer.from_folder(folder)
    window = min(DEFAULT_WINDOW, context) if args.window is None else args.window
    stride = max(1, window // 2) if args.stride is None else args.stride
    encoding = tokenizer.backend.encode(text)
    tokens = encoding.ids
    check_windows(len(tokens), window=window, stride=stride, context=context)
    model = load_model(args, folder, mtp=False)
    with _progress(name, len(tokens) - 1) as on_scored:
        measured = perplexity(
            model, tokens, window=window, stride=stride, batch=args.batch, on_scored=on_scored
        )
    # Bytes from where the second token begins: the first one is not scored.
    nbytes = len(text[encoding.offsets[1][0] :].encode())
    report = {
        "text": name,
        "tokens": len(tokens),
        "scored_tokens": measured.scored_tokens,
        "scored_bytes": nbytes,
        "window": window,
        "stride": stride,
        "perplexity": measured.perplexity if math.isfinite(measured.perplexity) else None,
        "nats_per_token": measured.nats_per_token,
        "bits_per_byte": measured.bits_per_byte(nbytes),
        "tokens_per_second": measured.tokens_per_second,
        "seconds": measured.seconds,
        "compile_seconds": measured.compile_seconds,
    }
    print(json.dumps(report, ensure_ascii=False) if args.json else _for_people(report, measured))
    return 0


def _read(file: str, name: str) -> str:
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    if not content:
        raise PromptError(f"{name} is empty: expected a text to measure")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text (byte {error.start} is {content[error.start]:#04x}): save it as UTF-8"
        ) from error


@contextlib.contextmanager
def _progress(title: str, tokens: int) -> Iterator[Callable[[int, TokenScores], None]]:
    """A bar with the perplexity so far, on a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield lambda window, scores: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens, {task.fields[so_far]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(escape(title), total=tokens, so_far="compiling")
        nats, scored = 0.0, 0

        def on_scored(window: int, scores: TokenScores) -> None:
            nonlocal nats, scored
            nats -= scores.total
            scored += len(scores.logprobs)
            bar.update(task, completed=scored, so_far=f"{nats / scored:.4f} nats a token")

        yield on_scored


def _for_people(report: dict, measured: Perplexity) -> str:
    return "\n".join(
        [
            f"{report['text']}: {report['tokens']:,} tokens; windows of {report['window']:,}, "
            f"one every {report['stride']:,}",
            f"perplexity      {measured.perplexity:.4f}",
            f"nats per token  {report['nats_per_token']:.4f}",
            f"bits per byte   {report['bits_per_byte']:.4f}",
            f"{measured.scored_tokens:,} tokens scored in {measured.seconds:.1f} s, "
            f"{measured.tokens_per_second:.1f} tokens/s; {measured.read_tokens:,} read; "
            f"compiling took {measured.compile_seconds:.1f} s before that",
        ]
    )
