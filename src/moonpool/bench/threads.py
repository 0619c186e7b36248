"""`moonpool bench threads`: from one client process to many, all copying at once."""

from __future__ import annotations

import json
import subprocess
from typing import IO, Any, cast

from moonpool.bench.figures import tidy
from moonpool.bench.local import Progress
from moonpool.bench.node import run_worker
from moonpool.errors import MoonpoolError

KINDS = ("memcpy", "put", "get_into")


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    found = [1 << step for step in range(most.bit_length()) if 1 << step < most]
    return [*found, most]


def measure(url: str, counts: list[int], duration_s: float, progress: Progress) -> dict[str, Any]:
    """GB/s of all clients together, by their number: plain copies, then puts, then gets, `duration_s` each."""
    result: dict[str, Any] = {f"{kind}_gbps": {} for kind in KINDS}
    with progress("client processes", len(counts)) as tell:
        for count in counts:
            for kind, rate in _together(url, count, duration_s).items():
                result[f"{kind}_gbps"][str(count)] = tidy(rate)
            tell(1)
    return result


def _together(url: str, count: int, duration_s: float) -> dict[str, float]:
    workers = [
        run_worker(["copies", url, str(duration_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for _ in KINDS:  # all wait for the last one, then begin together
            for worker in workers:
                _line(worker)
            for worker in workers:
                print("go", file=cast("IO[str]", worker.stdin), flush=True)
        for worker in workers:
            _line(worker)
        found = [json.loads(_line(worker)) for worker in workers]
        for worker in workers:
            worker.wait(30)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return {kind: sum(rates[kind] for rates in found) for kind in KINDS}


def _line(worker: subprocess.Popen[str]) -> str:
    line = cast("IO[str]", worker.stdout).readline()
    if not line:
        raise MoonpoolError("a client process of the bench ended early; what it said stands above")
    return line
