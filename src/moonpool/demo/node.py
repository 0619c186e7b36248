"""A node for the length of the demo: a daemon process of its own, over a folder that goes with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import moonpool
from moonpool.errors import MoonpoolError, NodeUnavailable

START_S = 30.0
"""How long a node may take until it answers; on a busy machine imports alone take seconds."""

STOP_S = 10.0
"""How long it may take to stop by itself before it is killed."""


@contextmanager
def temporary_node(pool_bytes: int) -> Iterator[str]:
    """Run a node with a pool of `pool_bytes` and yield its URL. Afterwards it is stopped and its folder removed."""
    base = Path(tempfile.mkdtemp(prefix="moonpool-demo-", dir=_parent_folder(pool_bytes)))
    log, url = base / "node.log", f"unix:{base / 'node'}"
    command = [sys.executable, "-c", "from moonpool.cli import main; main()", "serve"]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--dir", str(base / "node"), "--pool", str(pool_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            _wait_until_ready(process, url, log)
            yield url
        finally:
            _stop(process)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _parent_folder(pool_bytes: int) -> str | None:
    """Return `/dev/shm` where the pool fits (in containers it often has 64 MB), else None for the usual place."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    free = status.f_bavail * status.f_frsize
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) and free > 2 * pool_bytes else None


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if process.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines()
            raise MoonpoolError(
                f"the demo's node ended at once: {said[-1] if said else f'exit {process.returncode}'}"
            )
        try:
            moonpool.connect(url, timeout_s=2.0).close()
            return
        except NodeUnavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
