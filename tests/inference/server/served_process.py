"""`qwen35 serve` in a process of its own, as people run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from typing import Self

START_SECONDS = 300
END_SECONDS = 60


class ServedProcess:
    """A server with the built-in model, and what it has said on standard error.

    Args:
        *options: of the command; the port is any that is free.
        environment: variables beside those of this process.

    Attributes:
        process: the server's.
        address: as it told.
        lines: of its standard error so far.
    """

    def __init__(self, *options: str, environment: dict[str, str] | None = None):
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qwen35_jax", "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(START_SECONDS), self.lines
        found = re.search(r"is served at (http://\S+)", "\n".join(self.lines))
        assert found is not None, self.lines
        self.address = found[1]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=END_SECONDS) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def end(self) -> int:
        """Asks it to end, and returns its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))
                if "is served at" in line:
                    self._ready.set()
        self._ready.set()  # it has ended: whoever waits shall see what it said
