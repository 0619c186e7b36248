"""What a batch grants, and to whom: an id for one object alone, nothing where the one who asked is gone."""

from __future__ import annotations

import pytest

from moonpool.node.steps import finish
from moonpool.status import Status
from moonpool.wire import messages as m
from tests.node.desk import MIB, Desk, steps_of


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_id_of_an_earlier_generation_releases_nothing(desk: Desk) -> None:
    desk.put(b"k")
    old = desk.ask(m.Acquire(1, [b"k"])).ids[0]
    desk.begin(m.Release(0, [old]))
    desk.ask(m.Remove(1, [b"k"]))
    desk.put(b"k")
    new = desk.ask(m.Acquire(1, [b"k"])).ids[0]
    assert new & 0xFFFF_FFFF == old & 0xFFFF_FFFF, "the same place of the table"
    desk.begin(m.Release(0, [old]))
    assert desk.pins(b"k") == 1
    assert desk.node.catalogue.counters.stale_ids == 1
    desk.begin(m.Release(0, [new]))
    assert desk.pins(b"k") == 0


def test_a_reservation_that_is_broken_off_gives_back_what_it_had(desk: Desk) -> None:
    steps = desk.begin(m.Reserve(1, [b"small", b"first", b"second"], [5000, 40 * MIB, 40 * MIB]))
    while next(steps) is None:
        pass  # until it waits for space
    assert len(desk.session.reservations) == 2
    steps.close()
    assert not desk.session.reservations
    assert desk.node.catalogue.space.live_bytes == 0
    assert desk.ask(m.Reserve(1, [b"small"], [5000])).statuses == [Status.OK]


def test_a_get_that_waits_for_checksums_and_is_broken_off_holds_nothing(desk: Desk) -> None:
    desk.put(b"k")
    steps = desk.begin(m.Acquire(1, [b"k"], checksums=True))
    assert next(steps) is not None
    assert desk.pins(b"k") == 1
    steps.close()
    assert desk.pins(b"k") == 0


def test_a_hold_that_is_adopted_and_broken_off_stays_as_it_was(desk: Desk) -> None:
    keys = [b"%d" % i for i in range(1000)]
    desk.put(*keys)
    assert desk.ask(m.Match(1, [m.GroupKeys(keys, 0, 0, 1)], "hold")).length == 1000
    steps = desk.begin(m.Adopt(1, "hold"))
    next(steps)
    assert desk.pins(keys[-1]) == 2
    steps.close()
    while desk.background:
        finish(desk.background.pop())
    assert [desk.pins(key) for key in keys] == [1] * 1000


@pytest.mark.parametrize("kind", ["reserve", "put"])
def test_a_long_batch_lets_others_in(desk: Desk, kind: str) -> None:
    keys = [b"%d" % i for i in range(1000)]
    request = m.Reserve(1, keys, [1] * 1000) if kind == "reserve" else m.PutInline(1, keys, [memoryview(b"v")] * 1000)
    pauses, reply = steps_of(desk.begin(request))
    assert pauses >= 7
    assert set(reply.statuses) == {Status.OK}
