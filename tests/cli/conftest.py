"""A real node, started as a user would start it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import moonpool
from tests.cli.command_line import COMMAND, ENVIRONMENT, CommandLine

START_S = 30.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Under /dev/shm and short: a Unix socket's name may have 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="moonpool-test-", dir="/dev/shm"))
    yield base / "node"
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of `moonpool serve`, once it answers."""
    arguments = ["serve", "--dir", str(folder), "--pool", "64MiB", "--name", "tested"]
    process = subprocess.Popen([*COMMAND, *arguments], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    cli, deadline = CommandLine(folder), time.monotonic() + START_S
    while cli("mode").returncode != 0:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "the node does not answer"
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stderr:
        process.stderr.close()


@pytest.fixture
def cli(serving: subprocess.Popen[str], folder: Path) -> CommandLine:
    """The command line against a node that starts each test empty and switched on."""
    command_line = CommandLine(folder)
    with moonpool.connect(command_line.url) as client:
        client.set_mode("on")
        client.clear()
    return command_line
