"""A client that comes back with much in its hands: told over in steps, and nothing is lost or kept meanwhile."""

from __future__ import annotations

import pytest

from moonpool.node.sessions import Standing
from moonpool.node.steps import finish
from moonpool.status import Status
from moonpool.wire import messages as m
from tests.node.desk import Desk, steps_of

KEYS = [b"%d" % i for i in range(2000)]


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.put(*KEYS, b"undeclared")
    return desk


def hello(desk: Desk, pins: list[tuple[int, int]], reservations: list[int]) -> m.Hello:
    session = desk.session
    return m.Hello(
        1, 1, 0, [], "", "desk", False, session.number, session.token, desk.node.pool_id, pins, reservations
    )  # fmt: skip


def cleared(desk: Desk) -> None:
    while desk.background:
        finish(desk.background.pop())


def test_what_is_declared_stays_and_the_rest_is_given_back(desk: Desk) -> None:
    ids = desk.ask(m.Acquire(1, KEYS)).ids
    desk.ask(m.Acquire(1, [*KEYS[:10], b"undeclared"]))
    written = desk.ask(m.Reserve(1, [b"new %d" % i for i in range(300)], [1] * 300)).ids
    desk.node.roster.quarantine(desk.session)
    steps = desk.dispatcher.hello(hello(desk, [(n, 2 if i < 10 else 1) for i, n in enumerate(ids)], written[:200]))
    pauses = 0
    while True:
        try:
            assert next(steps) is None
        except StopIteration as end:
            session, welcome = end.value
            break
        pauses += 1
        assert all(desk.pins(key) for key in (KEYS[0], KEYS[-1], b"undeclared")), "nothing is let go of meanwhile"
        assert desk.session.standing is Standing.QUARANTINED
    assert pauses == 2000 // 128 + 200 // 128
    assert (session, welcome.resumed, welcome.stale) == (desk.session, True, [])
    cleared(desk)
    stats = desk.ask(m.Stat(1, [*KEYS, b"undeclared"])).objects
    assert [stat.pins for stat in stats] == [2] * 10 + [1] * 1990 + [0]
    assert desk.ask(m.Commit(1, written)).statuses == [Status.OK] * 200 + [Status.STALE] * 100


def test_one_who_goes_while_coming_back_holds_nothing(desk: Desk) -> None:
    ids = desk.ask(m.Acquire(1, KEYS)).ids
    desk.node.roster.quarantine(desk.session)
    steps = desk.dispatcher.hello(hello(desk, [(number, 1) for number in ids], []))
    next(steps)
    desk.node.roster.end(desk.session, "process-gone")
    _, (session, welcome) = steps_of(steps)
    assert session is not desk.session
    assert (welcome.resumed, welcome.stale) == (False, ids)
    cleared(desk)
    assert {stat.pins for stat in desk.ask(m.Stat(1, KEYS), session).objects} == {0}


def test_a_return_that_is_broken_off_leaves_all_as_it_was(desk: Desk) -> None:
    ids = desk.ask(m.Acquire(1, KEYS)).ids
    desk.node.roster.quarantine(desk.session)
    steps = desk.dispatcher.hello(hello(desk, [(number, 1) for number in ids], []))
    for _ in range(10):
        next(steps)
    steps.close()
    cleared(desk)
    assert desk.session.standing is Standing.QUARANTINED
    assert {stat.pins for stat in desk.ask(m.Stat(1, KEYS)).objects} == {1}


def test_more_pins_on_an_object_than_can_be_counted_are_refused(desk: Desk) -> None:
    (number,) = desk.ask(m.Acquire(1, KEYS[:1])).ids
    _, welcome = finish(desk.dispatcher.hello(hello(desk, [(number, 1 << 20)] * 3000, [])))
    assert welcome.stale == [number] * 2999
    assert desk.pins(KEYS[0]) == 1 << 20
