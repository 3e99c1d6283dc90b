"""`qwen35 chat` with the built-in model, over piped standard input."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.cli import chat
from qwen35_jax.cli.main import main
from qwen35_jax.inference.chat.answer_parser import Content, Reasoning
from qwen35_jax.inference.engine import Engine, Request

FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris."
PERU, LIMA = "What is the capital of Peru?", "The capital of Peru is Lima."


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs a chat over lines of input; returns its two outputs."""

    def run(*lines: str | bytes, options: tuple[str, ...] = ()) -> tuple[str, str]:
        text = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert main(["chat", *options]) == 0
        return capsys.readouterr()

    return run


def test_turns_follow_each_other_and_are_saved(talk, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    out, err = talk("/system Be brief.", FRANCE, "", PERU, f"/save {saved}", "/quit", "unread")
    assert out == f"{PARIS}\n{LIMA}\n"
    assert f"(5 messages written to {saved})" in err
    assert "tokens/s" not in err
    assert json.loads(saved.read_text()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": PARIS},
        {"role": "user", "content": PERU},
        {"role": "assistant", "content": LIMA},
    ]
    assert list(tmp_path.iterdir()) == [saved]


def test_saving_keeps_what_a_name_stands_for_and_a_bad_name_ends_nothing(talk, tmp_path: Path) -> None:
    old, link, pipe, new = (tmp_path / name for name in ("old", "link", "pipe", "new"))
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to("old")
    os.mkfifo(pipe)
    umask = os.umask(0o027)
    try:
        _, err = talk("/save a\0b", f"/save {link}", f"/save {pipe}", f"/save {new}")
    finally:
        os.umask(umask)
    assert "is no name of a file" in err
    assert f"{pipe} was not written: it is there already, and no regular file" in err
    assert link.is_symlink() and json.loads(old.read_text()) == []
    assert stat.S_IMODE(old.stat().st_mode) == stat.S_IMODE(new.stat().st_mode) == 0o640
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_commands_say_what_they_did_and_the_chat_goes_on(talk, tmp_path: Path) -> None:
    lines = [
        FRANCE,
        "/reset",
        "/help",
        "/rest",
        "/x",
        "/save",
        f"/save {tmp_path}/no/file",
        b"\xff",
        "/system",
        PERU,
    ]
    out, err = talk(*lines, options=("--json", "--verbose", "--system", "Be brief."))
    assert json.loads(out) == {
        "messages": [{"role": "user", "content": PERU}, {"role": "assistant", "content": LIMA}]
    }
    assert PARIS in err and LIMA in err
    assert err.count("tokens/s; decode: ") == 2
    for said in (
        "(a new conversation)",
        "  /save FILE    write the messages",
        "no command /rest: did you mean /reset?",
        "no command /x: /help tells them",
        "/save needs the name of a file",
        f"{tmp_path}/no/file was not written: No such file or directory",
        "this line is not UTF-8 text",
        "(no system message)",
    ):
        assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_full_context_is_one_line_and_the_chat_goes_on(talk) -> None:
    out, err = talk("word " * 3000, FRANCE)
    assert out == f"{PARIS}\n"
    (line,) = err.splitlines()
    assert re.fullmatch(r"qwen35: the conversation would come to \d+ tokens, .* \(/reset starts anew\)", line)


def test_thoughts_stand_between_tags_where_nothing_can_be_dimmed(talk) -> None:
    out, err = talk(FRANCE, options=("--think", "--max-new-tokens", "6", "--min-new-tokens", "6"))
    assert re.fullmatch(r"<think>\n.+\n</think>\n\n.*\n", out, re.DOTALL)
    assert "(cut off after 6 tokens)" in err


def test_options_reach_the_engine(talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(engine: Engine, request: Request, **options: Any) -> None:
        asked.append((engine.memory, engine._runner._slots.memory.draft, request.settings))
        raise KeyboardInterrupt

    asked: list[Any] = []
    monkeypatch.setattr(Engine, "submit", interrupted)
    options = ("--temperature", "0.7", "--top-p", "0.9", "--seed", "3", "--stop", "x", "--speculate", "2")
    out, err = talk(FRANCE, options=(*options, "--context", "700"))
    ((memory, draft, settings),) = asked
    assert (settings.temperature, settings.top_p, settings.seed, settings.stop) == (0.7, 0.9, 3, ("x",))
    assert (memory.slots, memory.context) == (1, 700)
    assert 600 < settings.max_new_tokens < 700
    assert draft.tokens.shape == (1, 2)
    assert (out, err) == ("\n", "(stopped)\n")


def test_verbose_tells_what_came_from_the_prefix_cache(talk) -> None:
    system = "You are a geographer, and you answer every question with one short sentence. " * 4
    _, err = talk(FRANCE, PERU, options=("--verbose", "--system", system))
    first, second = (line for line in err.splitlines() if line.startswith("prefill: "))
    assert "prefix cache" not in first
    assert re.match(r"prefill: \d+ tokens after 64 from the prefix cache, \d+\.\d tokens/s; decode: ", second)


def test_a_first_interrupt_stops_an_answer_and_a_second_one_is_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    stops: list[None] = []
    with chat._interrupted_by(lambda: stops.append(None)):
        signal.raise_signal(signal.SIGINT)
        assert len(stops) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(stops) == 1
    assert signal.getsignal(signal.SIGINT) is before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_thoughts_are_dimmed_on_a_terminal_that_can(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    terminal = Terminal()
    printer = chat._AnswerPrinter(terminal)
    for event in (Reasoning("Hm"), Reasoning("."), Content("Yes")):
        printer(event)
    printer.end()
    dimmed = "\x1b[2mHm\x1b[0m\x1b[2m.\x1b[0m\n\nYes\n"
    assert terminal.getvalue() == (dimmed if value == "xterm" else "<think>\nHm.\n</think>\n\nYes\n")


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        chat._AnswerPrinter(output)(Content("a\x1b]0;title\x07\tb\x9b1m é\n"))
    assert terminal.getvalue() == "a\ufffd]0;title\ufffd\tb\ufffd1m é\n"
    assert file.getvalue() == "a\x1b]0;title\x07\tb\x9b1m é\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--speculate", "9"], "1 to 4"),
        (["--context", "1"], "--context is 1, expected 2 to 2048"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--system", "\udcff"], "not valid UTF-8"),
    ],
)
def test_bad_input_is_one_line_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], complaint: str
) -> None:
    monkeypatch.setattr("qwen35_jax.checkpoint.load", lambda *_, **__: pytest.fail("read the model"))
    assert main(["chat", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qwen35: error: ") and err.count("\n") == 1
    assert complaint in err


def test_a_model_without_chat_template_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(find_model("nano"), tmp_path / "copy"))
    (folder / "chat_template.jinja").unlink()
    assert main(["chat", "--model", str(folder)]) == 2
    assert "neither chat_template.jinja" in capsys.readouterr().err


def test_help_does_not_wait_for_jax() -> None:
    code = (
        "import sys\nfrom qwen35_jax.cli.main import main\n"
        "try: main(['chat', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


class Child:
    """A chat in a process of its own, whose output is read as far as is asked for and no further."""

    def __init__(self, *options: str, stdin: int, stdout: int, output: int):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qwen35_jax", "chat", *options],
            stdin=stdin,
            stdout=stdout,
            stderr=stdout,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"},
        )
        self._output = output

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def has_said_something(self, seconds: float) -> bool:
        return bool(select.select([self._output], [], [], seconds)[0])

    def wait_for(self, text: str) -> None:
        seen = b""
        while not seen.endswith(text.encode()):
            byte = os.read(self._output, 1) if self.has_said_something(seconds=60) else b""
            assert byte, f"waited for {text!r}, and there came only {seen.decode(errors='replace')!r}"
            seen += byte


def test_an_interrupt_stops_the_answer_and_not_the_program() -> None:
    # The answer is longer than the pipe, so that it cannot have ended before it is interrupted.
    output, child_output = os.pipe()
    fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 4096)
    child_input, commands = os.pipe()
    options = ["--ignore-eos", "--max-new-tokens", "1900"]
    child = Child(*options, stdin=child_input, stdout=child_output, output=output)
    os.close(child_input)
    os.close(child_output)
    with child:
        os.write(commands, FRANCE.encode() + b"\n")
        child.wait_for("is Paris.")
        child.interrupt()
        child.wait_for("(stopped)\n")
        os.write(commands, b"/reset\n" + PERU.encode() + b"\n")
        child.wait_for("is Lima.")
        child.interrupt()
        child.wait_for("(stopped)\n")
        child.interrupt()
        child.wait_for("(Ctrl-D or /quit ends)\n")
        os.close(commands)
        assert child.process.wait(timeout=60) == 0
    os.close(output)


def test_on_a_terminal_there_is_a_prompt_and_ctrl_d_ends() -> None:
    controller, terminal = pty.openpty()
    child = Child(stdin=terminal, stdout=terminal, output=controller)
    os.close(terminal)
    with child:
        child.wait_for("/help tells the commands, Ctrl-D ends.")
        child.wait_for("> ")
        # The line editor does not see a signal between its prompt and its first look at the keyboard.
        for _ in range(60):
            child.interrupt()
            if child.has_said_something(seconds=1):
                break
        child.wait_for("(Ctrl-D or /quit ends)")
        child.wait_for("> ")
        os.write(controller, b"/reset\n")
        child.wait_for("(a new conversation)")
        child.wait_for("> ")
        os.write(controller, b"\x04")
        assert child.process.wait(timeout=60) == 0
    os.close(controller)
