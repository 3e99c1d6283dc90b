"""`qwen35 spec`: the JSON that other tools read, and tables that fit the terminal."""

from __future__ import annotations

import json

import pytest

from qwen35_jax.cli import main as cli
from tests.config_files import flat, moe_section, nested, text_section


def spec(capsys, *arguments: str) -> str:
    assert cli.main(["spec", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize(
    ("name", "parameters", "linear", "full"),
    [("Qwen/Qwen3.8-27B", 26_895_998_464, 48, 16), ("qwen3.5-0.8b", 752_393_024, 18, 6)],
)
def test_json_of_a_published_model(capsys, name, parameters, linear, full):
    told = json.loads(spec(capsys, name, "--json"))
    assert told["parameters"]["text"] == parameters
    parts = told["parameters"]["by_part"]
    assert {"embedding", "gated_delta_net", "attention", "mlp", "lm_head", "mtp", "vision"} <= parts.keys()
    assert told["layers"] == {"linear_attention": linear, "full_attention": full}
    for node in told["nodes"]:
        assert {"name", "op", "layers", "formula", "constants", "tensors"} <= node.keys()
    core = next(node for node in told["nodes"] if node["name"] == "gdn.core")
    assert len(core["layers"]) == linear


def test_json_says_what_the_projections_map(capsys):
    nodes = {node["name"]: node for node in json.loads(spec(capsys, "Qwen/Qwen3.8-27B", "--json"))["nodes"]}
    wide = nodes["gdn.in_proj"]
    assert (wide["constants"]["in_features"], wide["constants"]["out_features"]) == (5120, 16480)
    assert sum(shape[0] for shape in wide["tensors"].values()) == 16480
    assert nodes["gdn.conv"]["constants"]["channels"] == 10240
    assert nodes["attn.qkv_proj"]["constants"]["out_features"] == 14336
    assert nodes["mlp.gate_up"]["constants"]["out_features"] == 34816
    name = "model.language_model.layers.{layer}.linear_attn.conv1d.weight"
    assert nodes["gdn.conv"]["tensors"] == {name: [10240, 1, 4]}


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_dtype_decides_the_bytes(capsys, dtype, size):
    told = json.loads(spec(capsys, "Qwen/Qwen3.5-0.8B", "--json", "--dtype", dtype))
    assert told["weights_bytes"] == size * told["parameters"]["total"]
    assert told["dtype"] == ("bfloat16" if dtype == "auto" else dtype)


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_folder_or_file_is_described_in_its_own_dtype(capsys, tmp_path, place):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(flat(dtype="float32")))
    told = json.loads(spec(capsys, str(path if place == "file" else tmp_path), "--json"))
    assert told["model_type"] == "qwen3_5_text"
    assert told["weights_bytes"] == 4 * told["parameters"]["total"]


FILES = {
    "dense": nested(text_section(mtp_num_hidden_layers=1)),
    "sparse": flat(moe_section()),
    "tied": flat(tie_word_embeddings=True),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("model", ["Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-122B-A10B", *FILES])
def test_tables_fit_the_terminal_and_cut_nothing(capsys, monkeypatch, tmp_path, columns, model):
    monkeypatch.setenv("COLUMNS", str(columns))
    name = model
    if model in FILES:
        (tmp_path / "config.json").write_text(json.dumps(FILES[model]))
        name = str(tmp_path)
    told = json.loads(spec(capsys, name, "--json"))
    out = spec(capsys, name)
    assert "\x1b" not in out, "no colours where there is no terminal"
    assert "…" not in out
    lines = out.splitlines()
    assert max(len(line.rstrip()) for line in lines if line.strip() != str(tmp_path)) <= columns
    assert f"{told['parameters']['text']:,} text parameters" in out
    for node in told["nodes"]:
        row = next(line for line in lines if line.startswith(f"{node['name']} "))
        assert node["op"] in row
        assert node["maps"] in row
        if node["parameters"]:
            assert f"{node['parameters']:,}" in row
    unwrapped = " ".join(out.split())
    for node in told["nodes"]:
        for step in node["formula"].split("; "):
            assert step in unwrapped
    if model == "tied":
        assert "tied" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Qwen3.8-27",
            "'Qwen3.8-27': no such file or folder, and neither 'nano' nor a hub id (like Qwen/Qwen3.5-0.8B); "
            "no published model of the name 'Qwen3.8-27';",
        ),
        ("./nowhere/at/all", "'./nowhere/at/all': no such file or folder"),
        ("", "no published model of the name ''"),
    ],
)
def test_an_unknown_name_is_one_clear_line(capsys, name, message):
    assert cli.main(["spec", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qwen35: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_without_a_config_is_one_clear_line(capsys, tmp_path):
    assert cli.main(["spec", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"qwen35: error: {tmp_path}/config.json: no such file")


def test_of_a_hub_model_only_the_config_is_downloaded(capsys, monkeypatch, tmp_path):
    from qwen35_jax.checkpoint import model_name

    def download(hub_id, *, wanted):
        assert (hub_id, wanted) == ("someone/some-finetune", ["config.json"])
        return tmp_path

    monkeypatch.setattr(model_name, "download", download)
    (tmp_path / "config.json").write_text(json.dumps(flat()))
    told = json.loads(spec(capsys, "someone/some-finetune", "--json"))
    assert (told["name"], told["model_type"]) == ("someone/some-finetune", "qwen3_5_text")


def test_a_hub_id_is_looked_up_where_the_environment_says(capsys, monkeypatch, tmp_path):
    """With nothing in the cache and the network off, the complaint says so at once."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert cli.main(["spec", "someone/some-finetune"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("qwen35: error: 'someone/some-finetune': no such file or folder, and as a hub id: ")
    assert "HF_HUB_OFFLINE" in err
    assert err.count("\n") == 1
