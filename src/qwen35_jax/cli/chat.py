"""`qwen35 chat`: a conversation in the terminal, or over standard input, one line a turn."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from qwen35_jax.cli.options import (
    add_generation_options,
    add_model_options,
    generation_settings,
    load_model,
    speculation,
)
from qwen35_jax.cli.speeds import speed_line
from qwen35_jax.errors import PromptError

if TYPE_CHECKING:
    from qwen35_jax.inference.chat.answer_parser import AnswerEvent
    from qwen35_jax.inference.chat.conversation import Conversation
    from qwen35_jax.inference.engine import Engine

HELP = (
    "Talk to a model. Answers go to standard output as they come, thoughts dimmed on a terminal and between "
    "<think> tags elsewhere; what the program has to say goes to standard error. Ctrl-C stops an answer, Ctrl-D "
    "ends; /help tells the commands. Standard input may be a file or a pipe, one line a turn."
)
PROMPT = "> "
COMPILING_IS_TOLD_AFTER = 1.0
"""Seconds of waiting."""
_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="think before answering, or not (default: what the checkpoint's chat template does)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the conversation may come to (default: up to 32768, as the model and memory allow)",
    )
    add_generation_options(parser, default_new_tokens=2048)
    output = parser.add_argument_group("output")
    output.add_argument("--verbose", action="store_true", help="tell the speeds of each answer")
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with all messages at the end; answers go to standard error",
    )


def run(args: argparse.Namespace) -> int:
    # From here on JAX is loaded. What is cheap to check is checked before the weights are read.
    from qwen35_jax.checkpoint.model_name import find_model
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.inference.chat.conversation import Conversation
    from qwen35_jax.inference.chat_template import ChatTemplate, encode_chat
    from qwen35_jax.inference.compilation_cache import enable_compilation_cache
    from qwen35_jax.inference.engine import Engine
    from qwen35_jax.inference.stop_tokens import chat_stop_token_ids
    from qwen35_jax.inference.tokenizer import Tokenizer

    enable_compilation_cache()
    folder = find_model(args.model)
    config = ModelConfig.from_hf(folder)
    most = config.text.max_context
    if args.context is not None and not 2 <= args.context <= most:
        raise PromptError(f"--context is {args.context}, expected 2 to {most}, the model's own")
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder)
    settings = generation_settings(args, folder)
    stop_ids = chat_stop_token_ids(folder, config_ids=config.text.eos_token_id, tokenizer=tokenizer)
    drafting = speculation(args, config)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    encode_chat(
        template, tokenizer, [*system, {"role": "user", "content": "Hello"}], enable_thinking=args.think
    )
    model = load_model(args, folder, mtp=drafting is not None)
    with Engine(
        model, tokenizer, slots=1, context=args.context, speculation=drafting, warm_up=False
    ) as engine:
        conversation = Conversation(
            engine,
            tokenizer,
            template,
            settings=settings,
            stop_ids=stop_ids,
            enable_thinking=args.think,
            system=args.system,
        )
        output = sys.stderr if args.json else sys.stdout
        _Dialogue(conversation, engine, verbose=args.verbose, output=output).run(args.model)
    if args.json:
        print(json.dumps({"messages": conversation.all_messages}, ensure_ascii=False))
    return 0


class _Dialogue:
    """Reads lines, and does what they say or has them answered, until the input ends."""

    def __init__(self, conversation: Conversation, engine: Engine, *, verbose: bool, output: TextIO):
        self._conversation = conversation
        self._engine = engine
        self._verbose = verbose
        self._output = output
        self._going_on = True
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "tell the commands", self._help),
            "/reset": ("", "forget the conversation; the system message stays", self._reset),
            "/save": ("FILE", "write the messages to a file, as JSON", self._save),
            "/system": ("TEXT", "set the system message; without a text, take it away", self._set_system),
            "/quit": ("", "end, as Ctrl-D does", self._quit),
        }

    def run(self, model_name: str) -> None:
        if _is_interactive():
            _note(f"A chat with {model_name}. /help tells the commands, Ctrl-D ends.")
        while self._going_on:
            try:
                line = _read_line()
                if line is None:
                    return
                self._take(line)
            except PromptError as error:
                _note(f"qwen35: {error}")
            except KeyboardInterrupt:
                _note("\n(Ctrl-D or /quit ends)")

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer(line.strip())
            return
        name, _, rest = line.strip().partition(" ")
        if name not in self._commands:
            near = difflib.get_close_matches(name, self._commands, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help tells them"
            raise PromptError(f"no command {name}: {hint} (begin with a space to say it to the model)")
        self._commands[name][2](rest.strip())

    def _answer(self, text: str) -> None:
        from qwen35_jax.inference.chat.conversation import ContextFullError

        printer = _AnswerPrinter(self._output)
        try:
            with _interrupted_by(self._conversation.stop), self._told_of_compiling():
                turn = self._conversation.ask(text, printer)
        except ContextFullError as error:
            raise PromptError(f"{error} (/reset starts anew)") from error
        printer.end()
        if turn.result is None:
            _note("(stopped)")
            return
        (generation,) = turn.result.generations
        if generation.finish_reason == "length":
            _note(f"(cut off after {len(generation.tokens)} tokens)")
        if self._verbose:
            _note(speed_line(turn.result))

    @contextlib.contextmanager
    def _told_of_compiling(self) -> Iterator[None]:
        """Says so where an answer waits for a compiler, which only Ctrl-C twice gets out of."""

        def tell() -> None:
            if self._engine.compiling:
                _note("(compiling for questions of this length, once; Ctrl-C twice does not wait for it)")

        timer = threading.Timer(COMPILING_IS_TOLD_AFTER, tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _help(self, rest: str) -> None:
        usages = {f"{name} {argument}".strip(): what for name, (argument, what, _) in self._commands.items()}
        width = max(map(len, usages))
        _note("\n".join(f"  {usage:<{width}}  {what}" for usage, what in usages.items()))
        _note("Anything else is said to the model; begin with a space what begins with a slash.")

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        _note("(a new conversation)")

    def _save(self, rest: str) -> None:
        if not rest:
            raise PromptError("/save needs the name of a file")
        messages = self._conversation.all_messages
        try:
            _write_json(Path(os.path.realpath(os.path.expanduser(rest))), messages)
        except OSError as error:
            raise PromptError(f"{rest} was not written: {error.strerror}") from error
        except ValueError as error:
            raise PromptError(f"{rest!r} is no name of a file: {error}") from error
        _note(f"({len(messages)} message{'s' * (len(messages) != 1)} written to {rest})")

    def _set_system(self, rest: str) -> None:
        self._conversation.system = rest or None
        _note("(system message set)" if rest else "(no system message)")

    def _quit(self, rest: str) -> None:
        self._going_on = False


class _AnswerPrinter:
    """Prints an answer while it comes, with its thoughts told from the rest."""

    def __init__(self, output: TextIO):
        self._output = output
        # A model that was told to may write sequences that steer the terminal.
        self._unprintable = dict.fromkeys(_CONTROLS, "\ufffd") if output.isatty() else {}
        dims = output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._opening, self._closing = ("", "\n\n") if dims else ("<think>\n", "\n</think>\n\n")
        # Around every piece, so that nothing else is ever dimmed, whatever happens in between.
        self._thought = f"{DIM}{{}}{PLAIN}" if dims else "{}"
        self._thinking = False

    def __call__(self, event: AnswerEvent) -> None:
        from qwen35_jax.inference.chat.answer_parser import Content, Reasoning

        if isinstance(event, Reasoning):
            if not self._thinking:
                self._output.write(self._opening)
                self._thinking = True
            self._output.write(self._thought.format(event.text.translate(self._unprintable)))
        elif isinstance(event, Content):
            self._end_thought()
            self._output.write(event.text.translate(self._unprintable))
        self._output.flush()

    def end(self) -> None:
        """Ends the answer's last line."""
        self._end_thought()
        self._output.write("\n")
        self._output.flush()

    def _end_thought(self) -> None:
        if self._thinking:
            self._output.write(self._closing)
            self._thinking = False


@contextlib.contextmanager
def _interrupted_by(stop: Callable[[], None]) -> Iterator[None]:
    """Has Ctrl-C call `stop` instead of being raised. A second one is raised: what runs on the device ends first."""
    stopped = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            signal.default_int_handler(number, frame)
        stopped = True
        stop()

    before = signal.signal(signal.SIGINT, take)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _read_line() -> str | None:
    """The next line of standard input without its end; None where the input ends.

    Raises:
        PromptError: it is not UTF-8 text.
    """
    try:
        if _is_interactive():
            _load_line_editing()
            return input(PROMPT)
        line = sys.stdin.buffer.readline().decode("utf-8")
    except EOFError:
        _note("")
        return None
    except UnicodeDecodeError as error:
        raise PromptError(f"this line is not UTF-8 text: {error}") from error
    return line.rstrip("\r\n") if line else None


def _load_line_editing() -> None:
    """Gives `input` arrow keys and a history, where Python has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what counts


def _write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all. One that is there keeps its permissions."""
    there = path.exists()
    if there and not path.is_file():
        raise OSError(errno.EINVAL, "it is there already, and no regular file")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=2)
            file.write("\n")
        os.chmod(name, stat.S_IMODE(path.stat().st_mode) if there else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """What new files are not permitted. It can only be read by setting it."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _note(text: str) -> None:
    """Says something beside the conversation."""
    print(text, file=sys.stderr, flush=True)
