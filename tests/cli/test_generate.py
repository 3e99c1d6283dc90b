"""`qwen35 generate` on a tiny checkpoint with random weights."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35_jax.checkpoint import export_hf
from qwen35_jax.cli.main import main
from tests.inference.tiny_model import CONTEXT, ascii_tokenizer, tiny_model

END_OF_TURN = 95
TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}[off]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tokenizer and chat template, whose random weights do not end an answer early."""
    model = tiny_model()
    embedding = model.parameters["embed_tokens"]
    embedding["weight"] = embedding["weight"].at[END_OF_TURN].set(0)
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    export_hf(model.parameters, model.config, path)
    ascii_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def run_json(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict:
    assert main(["generate", "--model", str(folder), "--max-new-tokens", "6", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that a refused command line prints."""
    assert main(["generate", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qwen35: error: ")
    assert err.count("\n") == 1
    return err


def test_the_built_in_model_answers_without_any_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "The capital of France", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == " is Paris."
    assert report["finish_reason"] == "stop"


def test_speculating_gives_the_same_answer_in_fewer_passes(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    options = ["--prompt", "The capital of France", "--dtype", "float32", "--ignore-eos", "--json"]
    reports = []
    for speculate in ([], ["--speculate", "2"]):
        assert main(["generate", "--max-new-tokens", "40", *options, *speculate]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    plain, speculated = reports
    assert speculated["tokens"] == plain["tokens"]
    assert plain["tokens_per_pass"] == 1 and speculated["tokens_per_pass"] > 1.5
    assert "1 to 4" in refusal(capsys, "--prompt", "x", "--speculate", "5")
    assert "no multi-token-prediction head" in refusal(
        capsys, "--model", str(folder), "--prompt", "x", "--speculate", "2"
    )


def test_json_holds_the_contract(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    report = run_json(capsys, folder, "--prompt", "Hello")
    assert report["prompt_tokens"] == [40, 69, 76, 76, 79]
    assert len(report["tokens"]) == 6
    assert report["text"] == ascii_tokenizer().decode(report["tokens"])
    assert report["finish_reason"] == "length"
    assert report["prefill_tokens_per_second"] > 0
    assert report["decode_tokens_per_second"] > 0
    ids = run_json(capsys, folder, "--prompt-ids", "40,69, 76,76,79")
    assert ids["tokens"] == report["tokens"]


def test_prompt_ids_need_no_tokenizer(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    with_tokenizer = run_json(capsys, copy, "--prompt-ids", "5,17,3")
    (copy / "tokenizer.json").unlink()
    without = run_json(capsys, copy, "--prompt-ids", "5,17,3")
    assert without["tokens"] == with_tokenizer["tokens"]
    assert without["text"] == ""
    ids = ",".join(map(str, without["tokens"]))
    for option, shown in (("--no-stream", f"{ids}\n"), ("--stream", f"{ids},\n")):
        command = [
            "generate",
            "--model",
            str(copy),
            "--prompt-ids",
            "5,17,3",
            "--max-new-tokens",
            "6",
            option,
        ]
        assert main(command) == 0
        assert capsys.readouterr().out == shown


def test_text_goes_to_stdout_and_speeds_to_stderr(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    text = run_json(capsys, folder, "--prompt", "Hello")["text"]
    for streaming in ("--stream", "--no-stream"):
        options = ["--model", str(folder), "--prompt", "Hello", "--max-new-tokens", "6", streaming]
        assert main(["generate", *options]) == 0
        out, err = capsys.readouterr()
        assert out == text + "\n"
        assert "prefill: 5 tokens," in err
        assert "decode: 5 tokens," in err


def test_json_with_stream_keeps_stdout_to_one_object(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    options = ["--model", str(folder), "--prompt", "Hello", "--max-new-tokens", "6", "--stream", "--json"]
    assert main(["generate", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] + "\n" in err


def test_a_dash_reads_the_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    assert run_json(capsys, folder, "--prompt", "-")["prompt_tokens"] == [40, 69, 76, 76, 79]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "not UTF-8" in refusal(capsys, "--model", str(folder), "--prompt", "-")


def test_chat_goes_through_the_template(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    def prompt(*options: str) -> str:
        tokens = run_json(capsys, folder, "--prompt", "Hi", "--chat", *options)["prompt_tokens"]
        return ascii_tokenizer().decode(tokens)

    assert prompt() == "<u>Hi"
    assert prompt("--system", "Go", "--no-think") == "<s>Go<u>Hi[off]"


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    sampling = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.99", "--min-p", "0.001"]
    penalties = ["--repetition-penalty", "1.1", "--presence-penalty", "0.2"]
    first = run_json(capsys, folder, "--prompt", "Hi", *sampling, *penalties, "--seed", "3")
    assert first["seed"] == 3
    assert run_json(capsys, folder, "--prompt", "Hi", *sampling, *penalties, "--seed", "3") == {
        **first,
        **{name: pytest.approx(first[name], rel=1e9) for name in first if "second" in name},
    }
    other = run_json(capsys, folder, "--prompt", "Hi", *sampling, *penalties, "--seed", "4")
    assert other["tokens"] != first["tokens"]


def test_stop_strings_and_stop_ids_end_the_answer(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    full = run_json(capsys, copy, "--prompt", "Hello")
    cut = run_json(capsys, copy, "--prompt", "Hello", "--stop", full["text"][2:4])
    assert (cut["text"], cut["finish_reason"]) == (full["text"][:2], "stop")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [96, full["tokens"][3]]}))
    stopped = run_json(capsys, copy, "--prompt", "Hello")
    assert stopped["tokens"] == full["tokens"][: full["tokens"].index(full["tokens"][3]) + 1]
    assert stopped["finish_reason"] == "stop"
    assert run_json(capsys, copy, "--prompt", "Hello", "--ignore-eos")["tokens"] == full["tokens"]


def test_the_checkpoints_own_sampling_holds_unless_overruled(
    capsys: pytest.CaptureFixture[str], copy: Path
) -> None:
    greedy = run_json(capsys, copy, "--prompt", "Hello")["tokens"]
    recommended = {"do_sample": True, "temperature": 5.0, "top_k": 90}
    (copy / "generation_config.json").write_text(json.dumps(recommended))
    assert run_json(capsys, copy, "--prompt", "Hello", "--seed", "1")["tokens"] != greedy
    assert run_json(capsys, copy, "--prompt", "Hello", "--temperature", "0")["tokens"] == greedy


def test_a_chat_ends_with_the_turn_whatever_the_checkpoint_names(
    capsys: pytest.CaptureFixture[str], copy: Path
) -> None:
    full = run_json(capsys, copy, "--prompt", "Hi", "--chat")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 96}))
    end = ascii_tokenizer().decode([full["tokens"][2]])
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    stopped = run_json(capsys, copy, "--prompt", "Hi", "--chat")
    assert stopped["finish_reason"] == "stop"
    assert stopped["tokens"] == full["tokens"][: full["tokens"].index(full["tokens"][2]) + 1]
    plain = run_json(capsys, copy, "--prompt", "<u>Hi")
    assert plain["prompt_tokens"] == full["prompt_tokens"]
    assert plain["tokens"] == full["tokens"]


def test_a_malformed_generation_config_is_one_line(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": "hot"}))
    line = refusal(capsys, "--model", str(copy), "--prompt", "Hi")
    assert f"{path}: temperature is 'hot', expected a number of 0 (greedy) or more" in line


def test_a_chat_template_that_is_not_utf_8_is_one_line(
    capsys: pytest.CaptureFixture[str], copy: Path
) -> None:
    (copy / "chat_template.jinja").write_bytes(b"\xff")
    line = refusal(capsys, "--model", str(copy), "--prompt", "Hi", "--chat")
    assert "chat_template.jinja is not UTF-8" in line


def test_wrong_model_path_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(capsys, "--model", str(tmp_path / "nowhere"), "--prompt", "Hi")


def test_folder_without_tokenizer_is_one_line(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(capsys, "--model", str(copy), "--prompt", "Hi")


def test_folder_without_chat_template_is_one_line(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    assert "neither chat_template.jinja" in refusal(capsys, "--model", str(copy), "--prompt", "Hi", "--chat")


def test_truncated_shard_is_one_line(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    shard = copy / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "model.safetensors" in refusal(capsys, "--model", str(copy), "--prompt", "Hi")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-ids", ""], "is empty"),
        (["--prompt-ids", "1,x"], "expected token ids between commas"),
        (["--prompt-ids", "97"], "expected an id from 0 to 96"),
        (["--prompt", "a" * CONTEXT], "leaves no room to answer in the model's context of 700"),
        (["--prompt", "Hi", "--max-new-tokens", "9999"], "9999 more are asked for"),
        (["--prompt", "Hi", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "Hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["--prompt", "Hi", "--stop", ""], "stop is"),
        (["--prompt", "Hi", "--no-think"], "add --chat"),
        (["--prompt-ids", "1", "--chat"], "--chat needs a text"),
        (["--prompt", "\udcff"], "not valid UTF-8"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, options: list[str], complaint: str
) -> None:
    assert complaint in refusal(capsys, "--model", str(folder), *options)


def test_a_prompt_is_required_and_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--prompt", "a", "--prompt-ids", "1"]):
        with pytest.raises(SystemExit) as stop:
            main(["generate", *options])
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_help_does_not_wait_for_jax() -> None:
    code = (
        "import sys\nfrom qwen35_jax.cli.main import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


COUNT_COMPILATIONS = """
import sys, jax
counts = {"cache_hits": 0, "cache_misses": 0}
def count(event, **details):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1
jax.monitoring.register_event_listener(count)
from qwen35_jax.cli.main import main
assert main(sys.argv[1:]) == 0
print(counts["cache_hits"], counts["cache_misses"], file=sys.stderr)
"""


def test_b94_a_second_process_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    options = ["generate", "--model", str(folder), "--prompt", "Hi", "--max-new-tokens", "6", "--json"]

    def run() -> tuple[list[int], int, int]:
        done = subprocess.run(
            [sys.executable, "-c", COUNT_COMPILATIONS, *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        hits, misses = map(int, done.stderr.split()[-2:])
        return json.loads(done.stdout)["tokens"], hits, misses

    tokens, _, compiled = run()
    assert compiled > 0
    again, found, compiled = run()
    assert compiled == 0
    assert found > 0
    assert again == tokens
