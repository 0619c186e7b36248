"""`moonpool bench threads`: from one client process to many, all copying at once."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from moonpool.bench.figures import tidy
from moonpool.bench.local import Progress
from moonpool.bench.node import line_of, worker

KINDS = ("memcpy", "put", "get_into")
ROUNDS = 7


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    found = [1 << step for step in range(most.bit_length()) if 1 << step < most]
    return [*found, most]


def measure(url: str, counts: list[int], duration_s: float, progress: Progress) -> dict[str, Any]:
    """GB/s of all clients together, by their number: plain copies, puts and gets in turn, `ROUNDS` times
    `duration_s` each; the median round's."""
    result: dict[str, Any] = {f"{kind}_gbps": {} for kind in KINDS}
    with progress("client processes", len(counts)) as tell:
        for count in counts:
            for kind, rate in _together(url, count, duration_s).items():
                result[f"{kind}_gbps"][str(count)] = tidy(rate)
            tell(1)
    return result


def _together(url: str, count: int, duration_s: float) -> dict[str, float]:
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        workers = [stack.enter_context(worker("copies", url, str(duration_s))) for _ in range(count)]
        for process in workers:
            line_of(process)
        for _ in range(ROUNDS):
            for kind in KINDS:
                for process in workers:
                    print(kind, file=process.stdin, flush=True)
                rates[kind].append(sum(float(line_of(process)) for process in workers))
    return {kind: median(found) for kind, found in rates.items()}
