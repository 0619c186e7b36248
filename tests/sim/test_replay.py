"""A million operations on objects of 4 KiB to 300 MB: the pool stays full, victims few, and hits as many as LRU's.

What would break it: placement that parts large objects by small ones, windows that take hot objects along, victims
much larger than what is needed, and free runs that are no use to anybody.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.node.windows import Seconds
from moonpool.sim.__main__ import main
from moonpool.sim.replay import Hits, Replay, replay_ideal
from moonpool.sim.trace import SIZES, TRACES, Op

POOL_BYTES = 32 * SIZES[-1]
SEED = 20_261


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("unordered", 20_000),
        ("even-counts", 40_000),
        ("mostly-small", 60_000),
        pytest.param("even-counts", 1_000_000, marks=pytest.mark.slow),
        pytest.param("unordered", 150_000, marks=pytest.mark.slow),
        pytest.param("mostly-small", 300_000, marks=pytest.mark.slow),
        pytest.param("mostly-tiny", 600_000, marks=pytest.mark.slow),
    ],
)
def test_the_pool_stays_full_and_hits_as_an_ideal_lru_does(name: str, operations: int) -> None:
    trace = TRACES[name](operations, SEED)
    ideal = replay_ideal(trace, POOL_BYTES)
    replay = Replay(trace, POOL_BYTES)
    replay.run()
    print(f"{name}, seed {SEED}: {replay.found} {ideal} {replay.live_share} {replay.evicted_percentile(99)}")
    assert len(trace.ops) == operations
    assert len(replay.evicted_per_needed) >= 1000
    assert replay.live_share >= 0.95
    assert replay.evicted_percentile(99) <= 2.0
    assert replay.found.rate >= 0.97 * ideal.rate
    assert replay.found.byte_rate >= 0.9 * ideal.byte_rate
    assert replay.refused == 0


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_uses_removes_and_pins_keys_of_every_size_and_repeats_itself(name: str) -> None:
    trace = TRACES[name](60_000, SEED)
    assert trace == TRACES[name](60_000, SEED)
    assert trace != TRACES[name](60_000, SEED + 1)
    assert set(trace.ops) == set(Op)
    assert {trace.sizes[key] for key in trace.keys} == set(SIZES)


def test_a_policy_that_evicts_the_hottest_hits_far_less() -> None:
    """So the comparison can fail."""

    class Hottest:
        def byte_cost(self, idle_s: Seconds) -> Seconds:
            return idle_s * idle_s

    trace = TRACES["even-counts"](20_000, SEED)
    replay = Replay(trace, POOL_BYTES, policy=Hottest())
    replay.run()
    assert replay.found.byte_rate < 0.9 * replay_ideal(trace, POOL_BYTES).byte_rate


def test_the_ideal_evicts_the_coldest_bytes_and_no_more() -> None:
    trace = TRACES["even-counts"](0, 0)
    trace.sizes[:3] = type(trace.sizes)("q", [60, 40, 50])
    trace.keys.extend([0, 1, 0, 2, 0, 1, 2])
    trace.ops.extend([Op.USE] * 7)
    # 1 goes for 2, then 2 for 1.
    assert replay_ideal(trace, 110) == Hits(gets=7, get_bytes=360, hits=2, hit_bytes=120)


def test_it_runs_from_the_command_line_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "space.json"
    main(["--operations", "5000", "--trace", "unordered", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written == json.loads(capsys.readouterr().out)
    assert written["operations"] == 5000
    assert written["unordered"]["hit_rate"] > 0


def test_a_replay_with_too_few_slots_says_so() -> None:
    with pytest.raises(RuntimeError, match="all 8 slots are in use"):
        Replay(TRACES["unordered"](1000, SEED), POOL_BYTES, slots=8).run()
