from __future__ import annotations

import logging
from typing import Any

import pytest

from moonpool.engines.vllm import guard
from moonpool.engines.vllm.guard import LOGGED_MAX, guarded


class Side:
    def __init__(self) -> None:
        self.told: list[Exception] = []
        self.faulty_raises = False

    def faulty(self, error: Exception) -> None:
        self.told.append(error)
        if self.faulty_raises:
            raise RuntimeError("faulty is faulty")

    @guarded(lambda self, value, more=0: ("instead", value, more))
    def answer(self, value: int, more: int = 0) -> Any:
        if value < 0:
            raise ValueError("negative")
        return value + more

    @guarded(lambda self: self.missing(), lambda: (0, False))
    def twice(self) -> Any:
        raise ValueError("first")

    @guarded(lambda self: None)
    def stop(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_logged", 0)


def test_what_goes_well_is_passed_on() -> None:
    side = Side()
    assert side.answer(1, more=2) == 3
    assert side.told == []


def test_what_raises_is_answered_otherwise_with_the_same_arguments() -> None:
    side = Side()
    assert side.answer(-1, more=2) == ("instead", -1, 2)
    (error,) = side.told
    assert str(error) == "negative"


def test_a_fault_in_telling_of_it_changes_nothing() -> None:
    side = Side()
    side.faulty_raises = True
    assert side.answer(-1) == ("instead", -1, 0)


def test_there_is_a_last_answer_where_the_other_raises_too() -> None:
    assert Side().twice() == (0, False)


def test_interrupts_pass() -> None:
    with pytest.raises(KeyboardInterrupt):
        Side().stop()


def test_a_fault_at_every_step_does_not_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    with caplog.at_level(logging.ERROR, "moonpool.vllm"):
        for _ in range(100):
            side.answer(-1)
    assert len(caplog.records) == LOGGED_MAX
    assert all(record.exc_info for record in caplog.records)
