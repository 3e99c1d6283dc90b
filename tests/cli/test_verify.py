"""`qwen35 verify` without the reference: options, output, exit statuses. Real runs are in tests/reference."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from qwen35_jax import verify
from qwen35_jax.cli import main as cli
from qwen35_jax.cli import verify as command
from qwen35_jax.verify.nodes import NODES
from qwen35_jax.verify.report import BOUNDS, Bounds, Errors, Report

END_TO_END = {"prefill": 2e-14, "forward": 3e-14, "decode": 1e-14, "cache": 4e-14, "chunked_prefill": 2e-14}


def report(bounds: Bounds, dtype: str = "float64", **nodes: float) -> Report:
    errors = Errors(nodes=dict.fromkeys(NODES, 1e-15) | nodes, end_to_end=dict(END_TO_END))
    return Report(errors, bounds, dtype, lengths=(24, 66), draws=2)


@pytest.fixture
def calls(monkeypatch):
    """Stands for PyTorch, transformers and the comparison itself; collects what the comparison was asked."""
    made = []

    def compared(subject, *, dtype, bounds, progress, **options):
        made.append(SimpleNamespace(subject=subject, dtype=dtype, bounds=bounds, **options))
        progress("a line of progress")
        return report(bounds, dtype, **{"gdn.core": 2e-14})

    stand_in = ModuleType("qwen35_jax.verify.run")
    stand_in.__dict__.update(verify_checkpoint=compared, verify_reduced=compared)
    logging = SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
    library = ModuleType("transformers")
    library.__dict__.update(logging=logging)
    monkeypatch.setattr(verify, "require_reference", lambda: None)
    monkeypatch.setattr(command, "require_reference", lambda: None)
    monkeypatch.setitem(sys.modules, "qwen35_jax.verify.run", stand_in)
    monkeypatch.setitem(sys.modules, "transformers", library)
    return made


def test_json_carries_the_fields_that_checks_read(calls, capsys):
    assert cli.main(["verify", "Qwen/Qwen3.8-27B", "--reduced", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["max_relative_error"] == 2e-14
    assert found["bound"] == 4.1e-14
    assert found["end_to_end_relative_error"] == 4e-14
    assert found["nodes"]["gdn.core"] == 2e-14
    assert set(found["nodes"]) == set(NODES)
    assert "progress" in err
    assert calls[0].subject.text.num_hidden_layers == 64
    assert calls[0].draws == 2


def test_a_bound_exceeded_is_exit_status_1_and_marked_in_the_table(calls, capsys):
    assert cli.main(["verify", "Qwen/Qwen3.5-4B", "--reduced", "--bound", "1e-14"]) == 1
    out = capsys.readouterr().out
    assert "gdn.core" in out
    assert "NOT equal" in out


def test_the_end_to_end_bound_counts_too(calls):
    assert cli.main(["verify", "Qwen/Qwen3.5-4B", "--reduced", "--end-to-end-bound", "3.5e-14"]) == 1
    assert cli.main(["verify", "Qwen/Qwen3.5-4B", "--reduced", "--end-to-end-bound", "4.5e-14"]) == 0


@pytest.mark.parametrize(("asked", "dtype"), [([], "float64"), (["--dtype", "auto"], "float64")])
def test_float64_unless_another_dtype_is_named(calls, asked, dtype):
    cli.main(["verify", "Qwen/Qwen3.5-4B", "--reduced", *asked])
    assert calls[0].dtype == dtype
    assert calls[0].bounds == BOUNDS[dtype]


def test_every_dtype_has_its_bounds(calls):
    for dtype, bounds in BOUNDS.items():
        cli.main(["verify", "Qwen/Qwen3.5-4B", "--reduced", "--dtype", dtype])
        assert calls[-1].bounds == bounds


def test_a_missing_number_fails_and_stays_valid_json():
    broken = report(BOUNDS["float64"], **{"attn.core": float("nan")})
    assert not broken.passed
    found = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert found["max_relative_error"] is None
    assert found["nodes"]["attn.core"] is None


def test_a_layer_that_is_off_though_its_nodes_are_not_fails():
    off = report(BOUNDS["float64"])
    off.errors.layers["full_attention"] = 1e-9
    assert not off.passed


def test_the_table_shows_every_node_and_the_verdict():
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    command.print_report(console, "nano", report(BOUNDS["float64"]))
    text = console.export_text()
    assert all(f" {name} " in text for name in (*NODES, *END_TO_END))
    assert "nano in float64: equal" in text


def test_without_the_reference_extra_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["verify"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "torch and transformers" in err
    assert "qwen35-jax[reference]" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no/such/folder/here"], "no/such/folder/here"),
        (["Qwen/Qwen9-1B", "--reduced"], "Qwen9-1B"),
        (["--bound", "-1"], "--bound"),
        (["--bound", "nan"], "--bound"),
        (["--draws", "0"], "--draws"),
        (["--dtype", "float16"], "--dtype"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(calls, capsys, arguments, named, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        status = cli.main(["verify", *arguments])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2
    assert named in err
    assert err.count("\n") == 1
    assert not calls
