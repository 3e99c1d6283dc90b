"""Entry point of `qwen35`: finds the command, reads its options, and turns errors into one line.

Every command is a module of this package with `HELP: str`, `configure(parser)` and `run(args) -> int`,
imported only when it is asked for, so that `qwen35 --help` does not wait for JAX.

Exit status: 0 done, 1 a check did not hold (`verify`), 2 bad usage or input or too little memory,
130 interrupted, 141 the reader of standard output went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from qwen35_jax.cli import options
from qwen35_jax.errors import Qwen35Error
from qwen35_jax.planning.tpu_library import compiler_alone

COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk to a model in the terminal",
    "serve": "answer requests of the OpenAI API over HTTP",
    "convert": "turn a Hugging Face checkpoint into an Orbax one",
    "export": "write a checkpoint in Hugging Face layout",
    "spec": "print a model's graph, tensor shapes and parameter counts",
    "verify": "compare a model with transformers, node by node",
    "eval": "measure how well a model predicts a text",
    "train": "fine-tune a model",
    "plan": "tell what a model costs, and compile it for TPUs that are not there",
}

USAGE_ERROR = 2
INTERRUPTED = 128 + 2  # what a shell reports for SIGINT
OUTPUT_CLOSED = 128 + 13  # and for SIGPIPE


class _OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line, instead of the whole usage followed by one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"qwen35: error: {message} (see `{self.prog} --help`)\n")


WRITES_NOTHING = ("generate", "serve", "spec", "plan", "verify", "eval")


def program() -> NoReturn:
    """The `qwen35` command: `main` in a process of its own, and out of it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started the process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if sys.argv[1:2] and sys.argv[1] in WRITES_NOTHING:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(INTERRUPTED))
    with compiler_alone():
        status = main()
    if status == INTERRUPTED:
        # Threads of JAX's compiler may be at work still: ending the interpreter under them crashes it.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status.

    Args:
        argv: the arguments after the program's name; those of this process when None.

    Raises:
        SystemExit: from argparse, after `--help` (status 0) or a usage error (status 2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except Qwen35Error as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more on its way out: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except MemoryError as error:
        return _fail(_out_of_memory("the computer", error, training=arguments[:1] == ["train"]))
    except RuntimeError as error:
        if not _is_out_of_device_memory(error):
            raise
        return _fail(_out_of_memory("the device", error, training=arguments[:1] == ["train"]))
    except OSError as error:
        # A full disk, a missing permission: the system's own words name the file.
        return _fail(str(error))


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        sys.stderr.write(_overview())
        return USAGE_ERROR
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(_version() + "\n")
        return 0
    if name not in COMMANDS:
        return _fail(_unknown(name))
    command = _load(name)
    parser = _OneLineParser(prog=f"qwen35 {name}", description=command.HELP, allow_abbrev=False)
    command.configure(parser)
    args = parser.parse_args(rest)
    with options.precision(args):
        return command.run(args)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"qwen35_jax.cli.{name}")


def _fail(message: str) -> int:
    sys.stderr.write(f"qwen35: error: {' '.join(message.split())}\n")
    return USAGE_ERROR


def _is_out_of_device_memory(error: RuntimeError) -> bool:
    # By name: JAX is imported by the commands that need it, and not for this question.
    jax_errors = sys.modules.get("jax.errors")
    return (
        jax_errors is not None
        and isinstance(error, jax_errors.JaxRuntimeError)
        and "RESOURCE_EXHAUSTED" in str(error)
    )


def _out_of_memory(where: str, error: Exception, *, training: bool) -> str:
    detail = str(error).strip().partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
    less = (
        "take more micro_batches or shorter rows, compute all again ([objective] rematerialize), train with [lora]"
        if training
        else "give a shorter prompt or ask for fewer tokens, use --dtype bfloat16"
    )
    return f"{where} has too little memory{f' ({detail})' if detail else ''}: {less}, or take a smaller model"


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"unknown option {name!r}: a command comes first (see `qwen35 --help`)"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return f"no command {name!r}: {hint}"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: qwen35 COMMAND [OPTIONS]",
        "",
        "The Qwen3.5 model family in JAX.",
        "",
        *(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()),
        "",
        "`qwen35 COMMAND --help` tells a command's options; `qwen35 --version` the versions in use.",
    ]
    return "\n".join(lines) + "\n"


def _version() -> str:
    parts = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax")]
    parts.append(f"Python {platform.python_version()}")
    return f"qwen35 {importlib.metadata.version('qwen35-jax')} ({', '.join(parts)})"
