"""`vllm serve` for the length of a measurement: started, waited for, asked for its counters, reset, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from engine import SOURCES
from prometheus_client.parser import text_string_to_metric_families

from moonpool.bench.node import free_port
from moonpool.errors import MoonpoolError

START_S = 560.0
"""How long a server may take until it answers: compiling and capturing graphs are minutes on a fresh machine."""
RESET_S = 60.0
"""How long the prefix cache may refuse to be reset: it does while a transfer still holds blocks."""
STOP_S = 30.0
POLL_S = 0.25
REQUEST_S = 30.0
LOG_LINES = 40
HITS = ("prefix_cache_hits", "external_prefix_cache_hits")
"""vLLM's counters of tokens found, in its own cache and by the connector."""

# A proxy that the environment names is not for the loopback.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EngineServer:
    """A server over `folder`, a model's, on the loopback; a context manager that leaves no process behind.

    `stand_in` is a folder with packages that aren't installed. The log goes to `log`, or is shown where the start
    fails. Raises `MoonpoolError` where the server ends early or doesn't answer within `START_S`.
    """

    def __init__(self, folder: Path, options: list[str], stand_in: Path | None, *, log: Path | None = None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.started_s = 0.0
        self._log = log
        self._stand_in = stand_in
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder),
            "--host", "127.0.0.1", "--port", str(port), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineServer:
        begun = time.perf_counter()
        with tempfile.TemporaryFile() if self._log is None else self._log.open("w+b") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self._stand_in),
                start_new_session=True,  # so that its engine and workers can be ended with it
            )
            try:
                self._wait_until_ready(begun)
            except BaseException as error:
                self.close()
                log.seek(0)
                said = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
                if isinstance(error, MoonpoolError):
                    raise MoonpoolError("\n".join([str(error), "its log ends so:", *said])) from None
                raise
        self.started_s = time.perf_counter() - begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all that it started; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # none of it is left
        process.wait()

    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens since the start, by where their KV cache came from."""
        counted = dict.fromkeys(SOURCES, 0)
        for name, labels, value in self._counters():
            if name == "vllm:prompt_tokens_by_source_total":
                counted[labels["source"]] += int(value)
        return counted

    def hits(self) -> dict[str, int]:
        """Tokens found since the start, by the engine's own cache and by the connector, as the scheduler counts."""
        counted = dict.fromkeys(HITS, 0)
        for name, _, value in self._counters():
            short = name.removeprefix("vllm:").removesuffix("_total")
            if short in counted:
                counted[short] += int(value)
        return counted

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache; the connector's stays. Raises `MoonpoolError` where it won't be."""
        deadline = time.monotonic() + RESET_S
        while not json.loads(self._ask("/reset_prefix_cache", b""))["success"]:
            if time.monotonic() > deadline:
                raise MoonpoolError(
                    f"the engine refused to reset its prefix cache for {RESET_S:g} s: something still holds its blocks"
                )
            time.sleep(POLL_S)

    def _wait_until_ready(self, begun: float) -> None:
        assert self._process is not None
        while True:
            if self._process.poll() is not None:
                raise MoonpoolError(f"vllm serve ended with status {self._process.returncode} before it served")
            try:
                self._ask("/health")
                return
            except OSError:
                pass  # not yet
            if time.perf_counter() - begun > START_S:
                raise MoonpoolError(f"vllm serve didn't answer within {START_S:g} s")
            time.sleep(POLL_S)

    def _counters(self) -> list[tuple[str, dict[str, str], float]]:
        families = text_string_to_metric_families(self._ask("/metrics").decode())
        return [(found.name, found.labels, found.value) for family in families for found in family.samples]

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        """GET, or POST where there is a body. Raises OSError."""
        answer: Any
        with _opener.open(urllib.request.Request(self.url + path, data=body), timeout=REQUEST_S) as answer:
            found: bytes = answer.read()
            return found


def environment(stand_in: Path | None) -> dict[str, str]:
    """What server and benchmark run with: no network, the route that resets the cache, and the stand-in's folder."""
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if stand_in is not None:
        paths = [variables.get("PYTHONPATH", ""), str(stand_in)]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return variables
