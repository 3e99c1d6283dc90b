"""scripts/soak_server.py, for some seconds: the script's own minutes are for machines with nothing else to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "soak_server.py"


@pytest.mark.extended
def test_answers_stay_those_of_each_request_alone_whoever_leaves():
    options = ["--seconds", "6", "--clients", "24", "--slots", "3", "--queue", "12", "--json"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=600, check=False
    )
    figures = json.loads(done.stdout)
    # Memory needs minutes to show where it settles.
    assert [fault for fault in figures["faults"] if "memory" not in fault] == [], figures
    assert figures["answers_equal"] > 10 and figures["clients_left"] > 0 and figures["refused_queue_full"] > 0
