"""`qwen35 generate`: continues a prompt, or answers it as a chat."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_jax.cli.options import (
    add_generation_options,
    add_json_option,
    add_model_options,
    generation_settings,
    load_model,
    speculation,
)
from qwen35_jax.cli.speeds import speed_line
from qwen35_jax.errors import PromptError

if TYPE_CHECKING:
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.inference.results import GenerationResult, TokenEvent
    from qwen35_jax.inference.tokenizer import Tokenizer

HELP = (
    "Continue a prompt. Text goes to standard output as it is generated (when that is a terminal, or with "
    "--stream), speeds to standard error. Without sampling options the checkpoint's own recommendation holds "
    "(generation_config.json), and where there is none the most likely token is taken."
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the text to continue; - reads standard input. Names of special tokens in it, such as "
        "<|im_end|>, stand for those tokens",
    )
    prompt.add_argument(
        "--prompt-ids", metavar="IDS", help="token ids to continue, as in 5,17,3; needs no tokenizer"
    )
    add_generation_options(parser, default_new_tokens=128)
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--chat", action="store_true", help="put the prompt into the checkpoint's chat template"
    )
    chat.add_argument("--system", metavar="TEXT", help="with --chat: a system message before the prompt")
    chat.add_argument("--no-think", action="store_true", help="with --chat: answer without thinking first")
    output = parser.add_argument_group("output")
    add_json_option(parser)
    output.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text as it comes; with --json to standard error (default: on a terminal)",
    )


def run(args: argparse.Namespace) -> int:
    if not args.chat and (args.system is not None or args.no_think):
        raise PromptError("--system and --no-think belong to a chat: add --chat")
    if args.chat and args.prompt is None:
        raise PromptError("--chat needs a text: give --prompt instead of --prompt-ids")

    # From here on JAX is loaded. What is cheap to check is checked before the weights are read.
    from qwen35_jax.checkpoint.model_name import find_model
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.inference.compilation_cache import enable_compilation_cache
    from qwen35_jax.inference.generation import generate
    from qwen35_jax.inference.prompts import check_prompts

    enable_compilation_cache()
    folder = find_model(args.model)
    config = ModelConfig.from_hf(folder)
    tokenizer = _tokenizer(folder, required=args.prompt is not None or bool(args.stop))
    prompt = _prompt_tokens(args, folder, tokenizer)
    settings = generation_settings(args, folder)
    check_prompts([prompt], settings, config.text)
    stop_ids = _stop_ids(args, folder, config, tokenizer)
    drafting = speculation(args, config)
    model = load_model(args, folder, mtp=drafting is not None)
    result = generate(
        model,
        [prompt],
        settings,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        on_token=_printer(args, in_ids=tokenizer is None),
        speculation=drafting,
    )
    _report(args, result, in_ids=tokenizer is None)
    return 0


def _tokenizer(folder: Path, *, required: bool) -> Tokenizer | None:
    from qwen35_jax.inference.tokenizer import FILE_NAME, Tokenizer

    if not required and not (folder / FILE_NAME).is_file():
        return None
    return Tokenizer.from_folder(folder)


def _prompt_tokens(args: argparse.Namespace, folder: Path, tokenizer: Tokenizer | None) -> list[int]:
    if args.prompt is None:
        return _parse_ids(args.prompt_ids)
    assert tokenizer is not None
    text = _standard_input() if args.prompt == "-" else args.prompt
    if not text:
        raise PromptError("the prompt is empty: give some text to continue")
    if not args.chat:
        return tokenizer.encode(text)
    from qwen35_jax.inference.chat_template import ChatTemplate, encode_chat

    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages.append({"role": "user", "content": text})
    template = ChatTemplate.from_folder(folder)
    return encode_chat(template, tokenizer, messages, enable_thinking=False if args.no_think else None)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise PromptError(
            f"--prompt-ids is {text!r}, expected token ids between commas, as in 5,17,3"
        ) from None


def _standard_input() -> str:
    """All of standard input, without the line end that `echo` and editors put last."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error}") from error


def _stop_ids(
    args: argparse.Namespace, folder: Path, config: ModelConfig, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    from qwen35_jax.inference.stop_tokens import chat_stop_token_ids, stop_token_ids

    config_ids = config.text.eos_token_id
    if args.chat:
        assert tokenizer is not None
        return chat_stop_token_ids(folder, config_ids=config_ids, tokenizer=tokenizer)
    return stop_token_ids(folder, config_ids=config_ids, tokenizer=tokenizer)


def _printer(args: argparse.Namespace, *, in_ids: bool) -> Callable[[TokenEvent], None] | None:
    """Shows an answer as it comes, where that is wanted; as token ids where there is no tokenizer."""
    if not (args.stream or (args.stream is None and not args.json and sys.stdout.isatty())):
        return None
    output = sys.stderr if args.json else sys.stdout

    def show(event: TokenEvent) -> None:
        if not in_ids:
            output.write(event.text)
        elif event.token is not None:
            output.write(f"{event.token},")
        if event.finish_reason is not None:
            output.write("\n")
        output.flush()

    return show


def _report(args: argparse.Namespace, result: GenerationResult, *, in_ids: bool) -> None:
    (answer,) = result.generations
    timing = result.timing
    if args.json:
        report = {
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "prefill_tokens_per_second": timing.prefill_tokens_per_second,
            "decode_tokens_per_second": timing.decode_tokens_per_second,
            "compile_seconds": timing.compile_seconds,
            "tokens_per_pass": answer.tokens_per_pass,
        }
        print(json.dumps(report, ensure_ascii=False))
    elif _printer(args, in_ids=in_ids) is None:
        print(",".join(map(str, answer.tokens)) if in_ids else answer.text)
    sys.stdout.flush()
    print(speed_line(result), file=sys.stderr)
