"""The end of a session that holds much: nobody is kept waiting by it, and nothing is given back twice or not at all."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from moonpool.node.sessions import Session
from moonpool.node.space import Space
from moonpool.status import Status
from moonpool.wire import messages as m
from tests.node.desk import MIB, Desk, steps_of

KEYS = [b"%d" % i for i in range(2000)]


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.put(*KEYS)
    return desk


@pytest.fixture
def other(desk: Desk) -> Session:
    return desk.node.roster.open("other", read_only=False)


def test_a_session_that_held_much_is_ended_in_steps(desk: Desk, other: Session) -> None:
    desk.ask(m.Acquire(1, KEYS), other)
    desk.ask(m.Acquire(1, KEYS[:10]), other)
    steps_of(desk.begin(m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold"), other))
    steps_of(desk.begin(m.Reserve(1, [b"new %d" % i for i in range(500)], [1] * 500), other))
    desk.node.roster.end(other, "bye")
    assert other.idle, "no request that comes too late finds anything to use"
    assert sum(desk.pins(key) for key in KEYS) > 3000, "the rest comes in the background"
    pauses, _ = steps_of(desk.background.pop())
    assert pauses > 30
    assert sum(desk.pins(key) for key in KEYS) == 0
    desk.put(*[b"new %d" % i for i in range(500)])


def test_a_request_that_is_broken_off_by_its_sessions_end_gives_nothing_back_twice(desk: Desk, other: Session) -> None:
    waiting = desk.begin(m.Acquire(1, KEYS, checksums=True), other)
    while next(waiting) is None:
        pass
    desk.node.roster.end(other, "process-gone")
    waiting.close()
    steps_of(desk.background.pop())
    assert sum(desk.pins(key) for key in KEYS) == 0
    assert desk.node.catalogue.counters.stale_ids == 0


def test_a_long_hold_is_released_in_steps(desk: Desk) -> None:
    steps_of(desk.begin(m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold")))
    assert desk.ask(m.ReleaseHold(1, "hold")).count == 1
    assert desk.ask(m.ReleaseHold(1, "hold")).count == 0
    pauses, _ = steps_of(desk.background.pop())
    assert pauses > 10
    assert sum(desk.pins(key) for key in KEYS) == 0


def test_a_full_pool_is_looked_through_once_a_batch(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    held = desk.ask(m.Acquire(1, KEYS))
    assert set(held.statuses) == {Status.OK}
    space, looks = type(desk.node.catalogue.space), []
    look = space.look_for_largest

    def counted(self: Space) -> Generator[None, None, int]:
        looks.append(self)
        return look(self)

    monkeypatch.setattr(space, "look_for_largest", counted)
    monkeypatch.setattr(desk.node.store, "clock", lambda: 1000.0)
    reply = desk.begin(m.Reserve(1, [b"x%d" % i for i in range(20)], [60 * MIB] * 20, m.Options(wait_s=0.0)))
    _, reply = steps_of(reply)
    assert set(reply.statuses) == {Status.NO_SPACE}
    assert str(desk.node.catalogue.space.largest_available()) in reply.details[19]
    assert len(looks) == 1
