"""Downloads, tested against a small server on this machine that answers as the hub does."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from qwen35_jax.checkpoint.hub import is_hub_id
from tests.checkpoint.tiny_checkpoint import read_tensors, same_bytes, write_checkpoint

MODEL = "someone/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves the files of one folder as the model `MODEL`, and notes what was asked for."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder = folder
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> set[str]:
        marker = f"GET /{MODEL}/resolve/{COMMIT}/"
        return {request.removeprefix(marker) for request in self.requests if request.startswith(marker)}


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        files = {
            str(f.relative_to(self.server.folder)): f for f in self.server.folder.rglob("*") if f.is_file()
        }
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": f.stat().st_size,
                    "oid": hashlib.sha1(f.read_bytes()).hexdigest(),
                }
                for name, f in files.items()
            ]
            self.send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith(f"/api/models/{MODEL}"):
            info = {"id": MODEL, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith(f"/{MODEL}/resolve/"):
            name = path.split("/", 5)[5]
            data = files[name].read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.send(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT}, body)
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "served"
    write_checkpoint(folder, shards=2)
    (folder / "modeling.py").write_text("raise SystemExit('code from the hub must not run')")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"another layout")
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


FIND = """
import sys
from qwen35_jax.checkpoint.hf import open_hf
from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.errors import CheckpointError
try:
    folder = find_model(sys.argv[1])
    open_hf(folder, mtp=True)
    print(folder)
except CheckpointError as error:
    print("refused:", error)
"""


def find(model: str, home: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", FIND, model]
    result = subprocess.run(command, env=inherited | settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_model_is_downloaded_once_and_then_found_offline(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = Path(find(MODEL, home, HF_ENDPOINT=hub.url))
    assert folder.is_relative_to(home)
    expected, found = read_tensors(hub.folder), read_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], expected[name]) for name in expected)
    # Weights and the small files beside them: no code, no pickles, no other layouts.
    wanted = {path.name for path in hub.folder.iterdir()} - {"modeling.py", "pytorch_model.bin", "original"}
    assert hub.downloads() == wanted
    assert {path.name for path in folder.iterdir()} == wanted

    hub.requests.clear()
    assert find(MODEL, home, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") == str(folder)
    assert hub.requests == []


def test_model_that_cannot_be_had_is_refused_with_the_reason(hub: Hub, tmp_path: Path) -> None:
    unknown = find("someone/else", tmp_path / "home", HF_ENDPOINT=hub.url)
    assert unknown.startswith("refused: 'someone/else': no such file or folder, and as a hub id: ")
    assert f"on {hub.url}: no such model" in unknown
    offline = find(MODEL, tmp_path / "home", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert "is not in the local cache, and HF_HUB_OFFLINE is set" in offline


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3.5-0.8B", True),
        ("a/b_c.d-e", True),
        ("nano", False),
        ("a/b/c", False),
        ("../a", False),
        ("a/..", False),
        ("/a/b", False),
        ("./a", False),
        ("~/a", False),
        ("a/b c", False),
        ("a/", False),
        ("", False),
    ],
)
def test_shape_of_a_hub_id(text: str, expected: bool) -> None:
    assert is_hub_id(text) == expected
