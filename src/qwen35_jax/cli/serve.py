"""`qwen35 serve`: a server that speaks the OpenAI API."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_jax.cli.options import add_model_options, add_speculation_option, load_model, speculation
from qwen35_jax.errors import PromptError

if TYPE_CHECKING:
    from qwen35_jax.config import ModelConfig

HELP = (
    "Answer requests of the OpenAI API over HTTP: chats and completions, streamed or not, with tools, JSON schemas "
    "and log-probabilities. A page to chat at is at /, numbers for Prometheus at /metrics. Settings that a request "
    "leaves out are those that the checkpoint recommends (generation_config.json). A signal such as Ctrl-C ends the "
    "server once what runs is answered; a second one cancels it."
)
KEY_VARIABLE = "QWEN35_API_KEY"
PREFILL_CHOICES = "16, 32, 64, 128, 256 or 512"
"""As `buckets.PREFILL_BUCKETS` has them, which would load JAX for a text."""
PATIENCE = 1.0
"""Seconds without a word."""
MAX_BODY_BYTES = 4 * 2**20
"""Room for some million characters, or half as many token ids."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="by which clients ask for the model (default: M, or the name of its folder)",
    )
    address = parser.add_argument_group("address")
    address.add_argument(
        "--host",
        default="127.0.0.1",
        help="default 127.0.0.1, for this machine only; 0.0.0.0 is every network that it is in",
    )
    address.add_argument(
        "--port", type=int, default=8000, metavar="N", help="default 8000; 0 takes any that is free"
    )
    address.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"a file with nothing but the key that clients have to send (or give it in {KEY_VARIABLE})",
    )
    address.add_argument(
        "--max-body-bytes",
        type=int,
        default=MAX_BODY_BYTES,
        metavar="N",
        help=f"of a request (default {MAX_BODY_BYTES})",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--slots", type=int, default=8, metavar="N", help="requests that run at the same time (default 8)"
    )
    engine.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that a prompt and its answer have together (default: up to 32768, as memory allows)",
    )
    engine.add_argument(
        "--prefill-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a prompt that are consumed in one piece, while the others wait: "
        f"{PREFILL_CHOICES} (default 256)",
    )
    engine.add_argument(
        "--queue", type=int, default=64, metavar="N", help="requests that may wait for a slot (default 64)"
    )
    engine.add_argument(
        "--prefix-cache-bytes",
        type=int,
        metavar="N",
        help="how much may be remembered of prompts and answers, for requests that begin alike; 0 remembers nothing "
        "(default: a tenth of the free memory)",
    )
    add_speculation_option(engine)


def run(args: argparse.Namespace) -> int:
    api_key = _api_key(args.api_key_file)
    # From here on JAX is loaded. What is cheap to check is checked before the weights are read.
    from qwen35_jax.checkpoint.model_name import find_model
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.inference.compilation_cache import enable_compilation_cache
    from qwen35_jax.inference.engine import Engine

    try:
        from qwen35_jax.inference.server.app import create_app
        from qwen35_jax.inference.server.running import Server, address_of, bound_socket, is_local
        from qwen35_jax.inference.server.served_model import ServedModel
    except ImportError as error:
        raise PromptError(
            f"a server needs {error.name}, which is not installed: pip install 'qwen35-jax[serve]'"
        ) from error

    enable_compilation_cache()
    folder = find_model(args.model)
    config = ModelConfig.from_hf(folder)
    _check_numbers(args, config)
    drafting = speculation(args, config)
    with bound_socket(args.host, args.port) as listener:
        served = ServedModel.from_folder(_model_name(args, folder), folder, config.text)
        model = load_model(args, folder, mtp=drafting is not None)
        with _telling(f"compiling the programs of {served.name}, which is served once they are there"):
            engine = Engine(
                model,
                served.tokenizer,
                slots=args.slots,
                context=args.context,
                prefill_tokens=args.prefill_tokens,
                queue_limit=args.queue,
                speculation=drafting,
                prefix_cache_bytes=args.prefix_cache_bytes,
            )
        app = create_app(
            engine,
            served,
            api_key=api_key,
            local=is_local(listener),
            max_body_bytes=args.max_body_bytes,
            most_choices=args.slots + args.queue,
        )

        def tell_address() -> None:
            memory, remembered = engine.memory, engine.statistics().prefix_cache.budget
            _note(
                f"{served.name} is served at {address_of(listener)} (the API at {address_of(listener)}/v1; "
                f"{memory.slots} slots of {memory.context} tokens take {memory.bytes / 2**20:.0f} MiB, "
                f"remembered prefixes up to {remembered / 2**20:.0f} MiB)"
            )
            if api_key is None and not is_local(listener):
                _note(
                    "warning: whoever can reach this address can use it; --api-key-file lets in those with a key"
                )

        with engine:
            Server(app, engine, tell_address).run(sockets=[listener])
    return 0


def _api_key(path: str | None) -> str | None:
    """The key that clients have to send, from a file or the environment: an argument would be seen by everyone."""
    if path is not None:
        try:
            key, source = Path(path).read_text(encoding="utf-8").strip(), f"--api-key-file {path}"
        except (OSError, ValueError) as error:
            raise PromptError(f"--api-key-file {path} cannot be read: {error}") from error
    elif (given := os.environ.get(KEY_VARIABLE)) is not None:
        key, source = given.strip(), KEY_VARIABLE
    else:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise PromptError(
            f"{source} holds no key: expected one line of letters, digits and signs, without spaces"
        )
    return key


def _check_numbers(args: argparse.Namespace, config: ModelConfig) -> None:
    """What the engine would refuse too, but only once the weights are there."""
    from qwen35_jax.inference.buckets import PREFILL_BUCKETS

    for name in ("slots", "queue", "max_body_bytes"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise PromptError(f"--{option} is {getattr(args, name)}, expected at least 1")
    if args.prefix_cache_bytes is not None and args.prefix_cache_bytes < 0:
        raise PromptError(f"--prefix-cache-bytes is {args.prefix_cache_bytes}, expected at least 0")
    if args.prefill_tokens not in PREFILL_BUCKETS:
        choices = ", ".join(map(str, PREFILL_BUCKETS))
        raise PromptError(f"--prefill-tokens is {args.prefill_tokens}, expected one of {choices}")
    most = config.text.max_context
    if args.context is not None and not 2 <= args.context <= most:
        raise PromptError(f"--context is {args.context}, expected 2 to {most}, the model's own")


def _model_name(args: argparse.Namespace, folder: Path) -> str:
    if args.model_name is not None:
        return args.model_name
    given = Path(args.model).expanduser()
    return folder.resolve().name if given == folder else args.model


@contextlib.contextmanager
def _telling(work: str) -> Iterator[None]:
    """Tells what is being done, and at its end how long it took, if it takes longer than people wait without asking.

    What is refused is refused at once, so that there is one line about it and no other.
    """
    started = time.perf_counter()
    telling = threading.Timer(PATIENCE, _note, [work])
    telling.daemon = True
    telling.start()
    try:
        yield
    except BaseException:
        telling.cancel()
        raise
    telling.cancel()
    telling.join()
    if (seconds := time.perf_counter() - started) >= PATIENCE:
        _note(f"compiled in {seconds:.1f} s")


def _note(text: str) -> None:
    print(f"qwen35: {text}", file=sys.stderr, flush=True)
