"""The end of a session that holds much: nobody is kept waiting by it, and nothing is given back twice or not at all."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from moonpool.node import roster
from moonpool.node.sessions import Session, Standing
from moonpool.node.space import Space
from moonpool.node.steps import finish
from moonpool.status import Status
from moonpool.wire import messages as m
from tests.node.desk import MIB, Desk, House, steps_of

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


def test_the_holds_of_a_session_that_ended_are_nobodys_though_they_go_in_steps(desk: Desk, other: Session) -> None:
    for i in range(1000):
        assert desk.ask(m.Match(1, [m.GroupKeys(KEYS[:1], 0, 0, 1)], f"hold {i}"), other).created
    desk.node.roster.end(other, "bye")
    assert desk.ask(m.ReleaseHold(1, "hold 999")).count == 0
    assert desk.ask(m.Adopt(1, "hold 999")).ids == []
    assert desk.ask(m.Match(1, [m.GroupKeys(KEYS[1:2], 0, 0, 1)], "hold 999")).created, "its name is free"
    background = desk.background.pop(0)
    pauses, _ = steps_of(background)
    assert pauses >= 1000 // 128 - 1
    assert list(desk.node.holds.by_name) == ["hold 999"]
    assert (desk.pins(KEYS[0]), desk.pins(KEYS[1])) == (0, 1)


def test_two_who_ask_for_the_same_hold_at_a_time_get_one(desk: Desk, other: Session) -> None:
    request = m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold")
    first, second = desk.begin(request), desk.begin(request, other)
    next(first)
    _, created = steps_of(second)
    _, found = steps_of(first)
    assert (created.created, found.created) == (True, False)
    assert found.length == created.length == len(KEYS)
    assert not desk.session.holds
    assert {stat.pins for stat in desk.ask(m.Stat(1, KEYS)).objects} == {1}


def test_the_barrier_falls_in_steps_and_what_was_removed_goes_with_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "SLICE_LIFTED", 100)
    silent = Session(99, standing=Standing.SILENT)
    desk.node.roster.sessions[99] = silent
    slots = np.array([desk.node.catalogue.find(key) for key in KEYS])
    desk.node.roster.recover(slots, {})
    desk.ask(m.Remove(1, KEYS[:300]))
    size = desk.node.catalogue.size(slots[0])
    assert finish(desk.node.roster.quarantined_bytes()) == len(KEYS) * size
    desk.node.roster.end(silent, "lock-gone")
    assert desk.node.roster.barrier is None
    pins = np.frombuffer(desk.node.store.pins, np.int32)
    left, steps = int(pins.sum()), desk.background.pop()
    assert left > len(KEYS) - 200
    desk.ask(m.Remove(1, KEYS[-1:]))  # between two steps: its turn is still to come
    desk.put(KEYS[-1], b"new")
    for _ in steps:
        assert 0 < left - int(pins.sum()) <= 228
        left = int(pins.sum())
    assert not pins.any()
    assert desk.node.catalogue.doomed == 0
    assert desk.node.catalogue.live == len(KEYS) - 300 + 1


def test_what_is_in_quarantine_is_counted_once_and_in_steps(desk: Desk, other: Session) -> None:
    size = desk.node.catalogue.size(desk.node.catalogue.find(KEYS[0]))
    for session in (desk.session, other):
        desk.ask(m.Acquire(1, KEYS), session)
    desk.ask(m.Match(1, [m.GroupKeys(KEYS, 0, 0, 1)], "hold"), other)
    assert finish(desk.node.roster.quarantined_bytes()) == 0
    for session in (desk.session, other):
        desk.node.roster.quarantine(session)
    pauses, found = steps_of(desk.node.roster.quarantined_bytes())
    assert found == len(KEYS) * size
    assert pauses >= 3 * len(KEYS) // 128 - 3


def test_many_sessions_without_a_pidfd_are_looked_at_and_ended_in_steps(tmp_path: Path) -> None:
    house, now = House(tmp_path), 1000.0
    tested = house.node.roster
    tested.clock = lambda: now
    sessions = [tested.open(f"{i}", read_only=False) for i in range(300)]
    for session in sessions:
        tested.watch(session)
        tested._watches[session.number].seen = True
    pauses, _ = steps_of(tested.tick())
    assert pauses == 300 // 128
    now += roster.LOCK_GRACE_S
    steps, before = tested.tick(), len(tested.sessions)
    for _ in steps:
        assert before - len(tested.sessions) <= 1
        before = len(tested.sessions)
    assert list(tested.sessions) == [house.session.number]


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
