"""`moonpool demo --engine vllm` with real engines, on a model a tenth the size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import moonpool
from moonpool.demo.node import temporary_node
from moonpool.demo.vllm.settings import FIRST, SECOND
from moonpool.demo.vllm.tamper import CONTROLS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_on_a_node_that_was_there_and_gives_back_its_room() -> None:
    with temporary_node(128 << 20) as url, moonpool.connect(url) as client:
        client.put("mine", b"stays")
        command = [sys.executable, "-m", "moonpool", "demo", "--engine", "vllm", "--quick", "--json", "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=590)
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert all(found["verdicts"][name]["same"] for name in (FIRST, SECOND))
        assert found["answers"][FIRST]["stored_bytes"] > 0
        assert found["answers"][SECOND]["loaded"] > found["answers"][SECOND]["computed"] > 0
        assert not any(found["verdicts"][name]["same"] for name in CONTROLS)
        assert [stat.key for stat in client.list()] == [b"mine"]
