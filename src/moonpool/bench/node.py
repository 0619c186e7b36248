"""A node for the length of a measurement: a daemon of its own over a temporary folder, killed and started at will."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import moonpool
from moonpool.bench.machine import available_bytes
from moonpool.errors import MoonpoolError, NodeUnavailable
from moonpool.sizes import format_bytes

START_S = 120.0
"""How long a node may take until it serves; a large pool is reserved and recovered in seconds."""
STOP_S = 20.0
POLL_S = 0.005


class OwnNode:
    """`moonpool serve` as a child over a folder under /dev/shm; a context manager that leaves nothing behind."""

    def __init__(self, pool_bytes: int, *options: str) -> None:
        free = min(available_bytes(), _free_in(Path("/dev/shm")))
        if free < pool_bytes * 1.05:
            raise MoonpoolError(
                f"a pool of {format_bytes(pool_bytes, binary=True)} is needed and {format_bytes(free, binary=True)} "
                "are free; free some memory, or measure less with --quick"
            )
        self.pool_bytes = pool_bytes
        self._base = Path(tempfile.mkdtemp(prefix="moonpool-bench-", dir="/dev/shm"))
        self._log = self._base / "node.log"
        metrics = f"127.0.0.1:{free_port()}"
        self.metrics_url = f"http://{metrics}/metrics"
        self.url = f"unix:{self._base / 'node'}"
        self._command = [
            sys.executable, "-c", "from moonpool.cli import main; main()", "serve",
            "--dir", str(self._base / "node"), "--pool", str(pool_bytes), "--metrics", metrics, *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Start the daemon, the first time or again, and return the seconds until it served a client."""
        begun = time.perf_counter()
        # What the user has set for a node of theirs is not what this one is measured with.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("MOONPOOL_")}
        with self._log.open("ab") as log:
            # In a session of its own, as a service manager or a container gives it: Ctrl-C doesn't reach it, and the
            # system shares cores between it and its clients as between services, not as within one.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        while True:
            if self._process.poll() is not None:
                said = self._log.read_text(errors="replace").strip().splitlines()
                raise MoonpoolError(f"the bench's node ended at once: {said[-1] if said else 'it said nothing'}")
            try:
                with moonpool.connect(self.url, timeout_s=START_S, prefault=False) as client:
                    client.mode()
                return time.perf_counter() - begun
            except NodeUnavailable:
                if time.perf_counter() - begun > START_S:
                    raise
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End it as a crash would, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def anonymous_bytes(self) -> int:
        """The node's own memory: what no file backs, so that pool and table don't count."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    def __enter__(self) -> OwnNode:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the daemon and remove its folder; safe to call twice."""
        process, self._process = self._process, None
        try:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            shutil.rmtree(self._base, ignore_errors=True)
            # A closed client's mapping keeps the pool's memory until the client is gone, which a cycle of references
            # may put off; the next node needs it now.
            gc.collect()


def wait_until_settled(client: moonpool.Client, checksums: bool = True) -> None:
    """Wait until the node has touched its pool, this client has faulted it in and new objects have checksums."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        stats = client.stats()
        touched = stats.touched_bytes >= stats.pool_bytes
        if touched and not (checksums and stats.checksums_waiting) and client.wait_prefaulted(START_S):
            return
        time.sleep(0.1)


@contextmanager
def worker(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of `moonpool.bench.worker`'s jobs as a fresh process, with pipes to and from it; gone when the block ends.

    In a terminal session of its own, so that Ctrl-C reaches the bench alone, which then ends it.
    """
    command = [sys.executable, "-m", "moonpool.bench.worker", *arguments]
    process = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a worker prints. Raises `MoonpoolError` where it has ended instead."""
    line = cast("IO[str]", process.stdout).readline()
    if not line:
        raise MoonpoolError("a process of the bench ended early; what it said stands above")
    return line


def _free_in(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def free_port() -> int:
    """A TCP port on the loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
