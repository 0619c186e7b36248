"""A real node for a test: `moonpool serve` in a process of its own, over a temporary folder.

with running_node(pool="64MiB", scrub_interval="1s") as node:
    client = node.connect()
    node.kill()      # -9; `start` brings it back over the same folder
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import moonpool
from moonpool.errors import MoonpoolError, NodeUnavailable

START_S = 30.0
"""How long a node may take until it answers: on a busy machine imports alone take seconds."""
STOP_S = 10.0
POLL_S = 0.01


class RunningNode:
    """One node's process and folder. Not thread-safe. Use `running_node`, which cleans up."""

    def __init__(
        self, folder: Path, options: Mapping[str, object], environment: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        self.folder = folder
        self.options = dict(options)
        """Options of `moonpool serve`, with underscores; what is changed here holds from the next `start` on."""
        self.environment = dict(environment)
        """Variables of the process beside this one's, such as `MOONPOOL_TEST`; likewise."""
        self.prefix = list(prefix)
        """A command to run the node under, such as `unshare --pid --fork`."""
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder.with_name(folder.name + ".log")

    @property
    def url(self) -> str:
        """What `moonpool.connect` takes."""
        return f"unix:{self.folder}"

    @property
    def pid(self) -> int:
        """The node's own pid, also where it runs under `unshare`."""
        assert self.process is not None, "the node isn't running"
        return innermost(self.process.pid)

    @property
    def log(self) -> str:
        """What all processes of this node have written so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it to answer."""
        assert self.process is None or self.process.poll() is not None, "the node is running already"
        flags = [
            part
            for name, value in self.options.items()
            for part in (f"--{'' if value is not False else 'no-'}{name.replace('_', '-')}", value)
            if not isinstance(part, bool)
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "moonpool", "serve", "--dir", str(self.folder), *map(str, flags)],
                env={**environment, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def start(self) -> RunningNode:
        """Start the process and wait until it answers. Raises `MoonpoolError` with what it said where it ends."""
        process = self.launch()
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.connect(name="probe", prefault=False).close()
                return self
            except NodeUnavailable:
                if process.poll() is not None:
                    raise MoonpoolError(f"the node ended with {process.returncode}:\n{self.log}") from None
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def connect(self, **options: Any) -> moonpool.Client:
        """A client of this node; takes what `moonpool.connect` takes but for the URL. The caller closes it."""
        return moonpool.connect(self.url, **options)

    def stats(self) -> moonpool.NodeStats:
        """The node's figures, over a session of their own (which they count)."""
        with self.connect(name="stats", prefault=False) as client:
            return client.stats()

    def kill(self) -> None:
        """End the process at once, as `kill -9` does, and reap it. Its files stay."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """Ask the process to end, and return its exit status. Its files stay."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def restart(self, *, kill: bool = True) -> None:
        """End the process (killed, or cleanly) and start another over the same folder."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for the process's end and return its exit status (negative: the signal that ended it)."""
        assert self.process is not None, "the node was never started"
        return self.process.wait(timeout_s)


@contextmanager
def running_node(
    pool: str = "64MiB",
    *,
    start: bool = True,
    parent: Path | None = None,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **options: object,
) -> Iterator[RunningNode]:
    """Run a node with these options of `moonpool serve` until the context ends, then end it and remove its folder.

    The folder is made under `parent`, by default /dev/shm. Raises `MoonpoolError` where the node can't start.
    """
    # Under /dev/shm and short: a Unix socket's name has at most 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="moonpool-test-", dir=parent or Path("/dev/shm")))
    base.chmod(0o755)
    node = RunningNode(base / "node", {"pool": pool, **options}, environment or {}, prefix)
    try:
        if start:
            node.start()
        yield node
    finally:
        if node.process is not None and node.process.poll() is None:
            node.signal(signal.SIGCONT)
            node.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                node.wait()
            if node.process.poll() is None:
                node.kill()
        shutil.rmtree(base, ignore_errors=True)


def innermost(pid: int) -> int:
    """What runs under `unshare`, which waits for it and passes no signal on; other processes are what they are."""
    try:
        while Path(f"/proc/{pid}/comm").read_text().strip() == "unshare":
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (OSError, IndexError):
        pass  # it has just started, or just ended
    return pid


def eventually(condition: Any, what: str = "", *, within_s: float = 10.0) -> Any:
    """Wait until `condition()` is true and return what it gave; AssertionError where it takes longer."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come true within {within_s} s"
        time.sleep(POLL_S)
    return found
