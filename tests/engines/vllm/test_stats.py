from __future__ import annotations

import pytest

from moonpool.engines.vllm.stats import METRICS, REASONS, UNSTORED, Tally, reason_of


def test_nothing_is_told_when_nothing_happened() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.asked(256, 0)
    assert tally.take() is not None
    assert tally.take() is None


def test_each_call_tells_what_has_been_added_since_the_last_one() -> None:
    tally = Tally()
    tally.asked(512, 256)
    tally.loaded(256, 1000, 0.5, 0.25, 1.0)
    assert tally.take() == {
        "asked_tokens": {"": 512},
        "hit_tokens": {"": 256},
        "loaded_tokens": {"": 256},
        "requests": {"asked": 1, "loaded": 1},
        "load_bytes": {"": 1000},
        "load_seconds": {"": 0.5},
        "saved_seconds": {"": 0.75},
    }
    tally.asked(512, 0)
    assert tally.take() == {"asked_tokens": {"": 512}, "requests": {"asked": 1}}
    assert tally.tokens["asked"] == 1024


def test_a_load_that_took_longer_than_prefill_is_time_lost() -> None:
    tally = Tally()
    tally.loaded(256, 1000, 3.0, 3.0, 1.0)
    assert tally.seconds["lost"] == 2.0
    assert tally.seconds["saved"] == 0.0


def test_where_prefill_was_never_measured_neither_saving_nor_loss_is_claimed() -> None:
    tally = Tally()
    tally.loaded(256, 1000, 3.0, 3.0, 0.0)
    assert (tally.seconds["saved"], tally.seconds["lost"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("the object went away meanwhile", "object gone"),
        ("the pool that holds it is not attached here", "node gone"),
        ("no node answers at /dev/shm/moonpool/node.sock (Connection refused)", "node gone"),
        ("an object of 4096 bytes where this worker's have 8192", "integrity"),
        ("the checksum of what was loaded is another", "integrity"),
        ("the load took longer than 10 s", "load too slow"),
        ("the mover has failed: an illegal memory access was encountered", "copy failed"),
        ("the worker failed", "copy failed"),
        ("prefill is faster", "prefill is faster"),
    ],
)
def test_errors_are_counted_by_their_kind(error: str, reason: str) -> None:
    assert reason_of(error) == reason
    tally = Tally()
    tally.failed(256, error)
    assert tally.recomputed == {reason: 256}


def test_reasons_stay_few_whatever_goes_wrong() -> None:
    tally = Tally()
    for i in range(1000):
        tally.failed(1, f"error {i} of object {i}")
        tally.skipped(f"reason {i}")
        tally.not_stored(f"no node, error {i}", 1)
    assert set(tally.recomputed) <= set(REASONS)
    assert set(tally.unstored) <= set(UNSTORED)


def test_every_figure_has_its_metric() -> None:
    tally = Tally()
    tally.asked(2, 1)
    tally.skipped("shadow", 1)
    tally.loaded(1, 1, 1.0, 1.0, 2.0)
    tally.loaded(1, 1, 3.0, 3.0, 2.0)
    tally.failed(1, "the object went away meanwhile")
    tally.stored(1, 1, 1.0)
    tally.not_stored("no room", 1)
    tally.shadowed("same", 1)
    figures = tally.take()
    assert figures is not None
    assert set(figures) == {metric.name for metric in METRICS}
    for metric in METRICS:
        assert ("" in figures[metric.name]) == (not metric.label)
