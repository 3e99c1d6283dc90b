"""The command line's frame: dispatch, one-line errors, exit statuses."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.cli import main as cli
from qwen35_jax.cli import options
from qwen35_jax.errors import CheckpointError


@pytest.fixture
def command(monkeypatch):
    """Plants one command, `probe`, whose `run` the test chooses."""

    def plant(run):
        def configure(parser: argparse.ArgumentParser) -> None:
            options.add_model_options(parser)
            options.add_json_option(parser)

        module = SimpleNamespace(HELP="A probe.", configure=configure, run=run)
        monkeypatch.setitem(cli.COMMANDS, "probe", "a probe")
        monkeypatch.setattr(cli, "_load", lambda name: module)

    return plant


def raises(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_listed_command_exists_and_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: qwen35 {name}" in capsys.readouterr().out


def test_help_lists_the_commands_on_stdout(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"\n  {name} " in out] == list(cli.COMMANDS)


def test_no_command_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "generate" in err


def test_version_names_jax_too(capsys):
    assert cli.main(["--version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("qwen35 0.")
    assert f"jax {jax.__version__}" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["genrate"], "no command 'genrate': did you mean 'generate'?"),
        (["xyz"], "no command 'xyz': the commands are generate, "),
        (["--model", "nano"], "unknown option '--model': a command comes first"),
    ],
)
def test_unknown_command_is_one_line(arguments, expected, capsys):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"qwen35: error: {expected}")
    assert err.count("\n") == 1


def test_unknown_option_is_one_line(command, capsys):
    command(lambda args: 0)
    with pytest.raises(SystemExit) as stop:
        cli.main(["probe", "--modle", "nano"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err == "qwen35: error: unrecognized arguments: --modle nano (see `qwen35 probe --help`)\n"


def test_the_command_status_is_the_exit_status(command):
    command(lambda args: 1)
    assert cli.main(["probe"]) == 1


def test_defaults_are_the_built_in_model_and_auto(command):
    seen = []
    command(lambda args: seen.append((args.model, args.dtype, args.json)) or 0)
    assert cli.main(["probe"]) == 0
    assert cli.main(["probe", "--model", "m", "--dtype", "bfloat16", "--json"]) == 0
    assert seen == [("nano", "auto", False), ("m", "bfloat16", True)]


def test_our_errors_are_one_line_without_traceback(command, capsys):
    command(raises(CheckpointError("m/model.safetensors: is 3 bytes long,\n  expected 12")))
    assert cli.main(["probe"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "qwen35: error: m/model.safetensors: is 3 bytes long, expected 12\n"


def test_system_errors_name_the_file(command, capsys):
    command(raises(PermissionError(13, "Permission denied", "/some/folder")))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "qwen35: error: [Errno 13] Permission denied: '/some/folder'\n"


ENORMOUS = 2**55


@pytest.mark.parametrize(
    ("where", "allocate"),
    [
        ("device", lambda args: jnp.zeros(ENORMOUS, jnp.int8)),
        ("computer", lambda args: np.zeros(ENORMOUS, np.int8)),
    ],
)
def test_too_little_memory_is_one_line_that_says_what_to_do(command, capsys, where, allocate):
    command(allocate)
    assert cli.main(["probe"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"qwen35: error: the {where} has too little memory (")
    assert "shorter prompt" in err
    assert "--dtype bfloat16" in err
    assert "smaller model" in err
    assert err.count("\n") == 1


def test_a_run_with_too_little_memory_is_told_the_settings_that_take_less(command, capsys):
    command(raises(MemoryError()))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "qwen35: error: the computer has too little memory: take more micro_batches or shorter rows, compute all again "
        "([objective] rematerialize), train with [lora], or take a smaller model\n"
    )


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: broken"), RuntimeError("RESOURCE_EXHAUSTED: not JAX's")]
)
def test_other_errors_of_the_device_keep_their_traceback(command, error):
    command(raises(error))
    with pytest.raises(RuntimeError, match=str(error)):
        cli.main(["probe"])


def test_other_errors_are_bugs_and_keep_their_traceback(command):
    command(raises(ValueError("not ours")))
    with pytest.raises(ValueError, match="not ours"):
        cli.main(["probe"])


def test_interrupt_exits_130_silently(command, capsys):
    command(raises(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr() == ("", "")


def test_float64_is_on_while_the_command_runs_and_off_afterwards(command):
    seen = []
    command(lambda args: seen.append(jnp.ones(1).dtype) or 0)
    assert cli.main(["probe", "--dtype", "float64"]) == 0
    assert cli.main(["probe", "--dtype", "float32"]) == 0
    assert seen == [jnp.float64, jnp.float32]
    command(raises(CheckpointError("broken")))
    assert cli.main(["probe", "--dtype", "float64"]) == 2
    assert jnp.ones(1).dtype == jnp.float32


def test_help_does_not_import_jax():
    code = (
        "import sys; from qwen35_jax.cli.main import main; main(['--help']); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_closed_output_is_quiet():
    code = (
        "import sys; from qwen35_jax.cli import main as cli\n"
        "cli._dispatch = lambda arguments: [print(line) for line in range(1_000_000)] and 0\n"
        "sys.exit(cli.main([]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.read(1)
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait() == 141


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "qwen35_jax", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("qwen35: error: no command 'nope'")


def test_the_command_runs_with_its_standard_streams_closed() -> None:
    for closed in ("<&-", ">&-", "2>&-"):
        command = f"{sys.executable} -m qwen35_jax spec nano --json {closed} > /dev/null"
        if closed == ">&-":
            command = f"{sys.executable} -m qwen35_jax spec nano --json {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_an_interrupt_ends_a_generation_at_once_with_the_shells_status() -> None:
    arguments = ["generate", "--prompt", "France", "--ignore-eos", "--max-new-tokens", "1500", "--stream"]
    with subprocess.Popen(
        [sys.executable, "-m", "qwen35_jax", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # it has begun to answer
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert b"Traceback" not in process.stderr.read()
