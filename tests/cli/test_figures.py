"""`moonpool status` for people: what matters is said, what is zero and normal is not."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.cli.figures import lines
from moonpool.config import Setting
from moonpool.observe.stats import Latency, NodeStats, OldestPin

GIB = 1 << 30
PLAIN: dict[str, object] = dict.fromkeys(NodeStats.__struct_fields__, 0) | {
    "name": "host-7",
    "pool_id": "ab" * 16,
    "incarnation": 3,
    "mode": "on",
    "uptime_s": 7200.0,
    "pool_bytes": 8 * GIB,
    "reserved_bytes": 8 * GIB,
    "touched_bytes": 8 * GIB,
    "live_bytes": 6 * GIB,
    "removals": {},
    "sessions_ended": {},
    "oldest_pin": None,
    "latencies": [],
    "options": {"mode": Setting("on", "default")},
}


def text_of(**changes: object) -> str:
    return "\n".join(lines(msgspec.convert(PLAIN | changes, NodeStats, strict=False)))


def test_a_node_at_rest_says_little() -> None:
    text = text_of()
    assert "node        host-7, mode on, up 2.00 h, incarnation 3\n" in text
    assert "pool        8.00 GiB, 75.0% live;" in text
    for word in ("quarantine", "CORRUPT", "touched", "reserved so far", "oldest pin", "removals", "latency", "options"):
        assert word not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"touched_bytes": 2 * GIB}, "2.00 GiB touched so far"),
        ({"reserved_bytes": GIB}, "1.00 GiB reserved so far"),
        ({"hits": 3, "misses": 1}, "3 hits, 1 misses (75.0% hits)"),
        ({"bytes_reserved": 200, "bytes_evicted": 150}, "0.75 bytes evicted per byte reserved"),
        ({"removals": {"evicted": 1200, "expired": 3}}, "removals    1,200 evicted, 3 expired"),
        ({"quarantined_bytes": GIB, "sessions_quarantined": 1}, "1 quarantined; 1.00 GiB in quarantine"),
        ({"corrupt_objects": 2}, "2 CORRUPT"),
        ({"no_space": 5}, "5 found no space"),
        ({"recovered": 5000}, "5,000 objects recovered at the start"),
        (
            {"oldest_pin": OldestPin(owner="vllm", session=4, pid=77, objects=12, age_s=90.0)},
            "oldest pin  1.50 min, 12 objects, held by vllm (pid 77)",
        ),
    ],
)
def test_what_is_out_of_the_ordinary_is_said(changes: dict[str, object], said: str) -> None:
    assert said in text_of(**changes)


def test_options_that_somebody_chose_are_listed_with_their_origin() -> None:
    options = {
        "pool": Setting("8589934592 B", "flag --pool"),
        "mode": Setting("on", "default"),
        "scrub_interval": Setting("60.0 s", "environment MOONPOOL_SCRUB_INTERVAL"),
    }
    first, second = text_of(options=options).splitlines()[-2:]
    assert first == "options     pool = 8589934592 B  (flag --pool)"
    assert second == "            scrub_interval = 60.0 s  (environment MOONPOOL_SCRUB_INTERVAL)"


def test_latencies_are_one_line_per_stage_with_the_slowest_space() -> None:
    def latency(stage: str, space: int, p99_s: float) -> Latency:
        return Latency(operation="get", stage=stage, space=space, batches=10, seconds=1, p50_s=20e-6, p99_s=p99_s)

    text = text_of(latencies=[latency("query", 0, 1e-3), latency("query", 1, 2e-3), latency("transfer", 0, 5e-3)])
    first, second = text.splitlines()[-2:]
    assert " ".join(first.split()) == "latency get query p50 20.0 us p99 2.00 ms 20 batches"
    assert " ".join(second.split()) == "get transfer p50 20.0 us p99 5.00 ms 10 batches"
