"""What one request or one turn of the node's chores may take, and what waits meanwhile: bounded, not forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from moonpool.errors import InvalidRequest, ReadOnly
from moonpool.node import dispatch
from moonpool.node.checksums import LOOKS_MAX
from moonpool.node.server import REFUSED_RECENTLY_S, Server
from moonpool.node.steps import finish
from moonpool.status import Status
from moonpool.wire import messages as m
from moonpool.wire.frames import encode
from tests.node.desk import MIB, Desk, House, steps_of


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_listing_fits_into_a_frame_and_goes_on_where_it_ended(desk: Desk) -> None:
    keys = [b"%0200d" % i for i in range(4000)]
    value = [memoryview(b"v")]
    desk.ask(m.PutInline(1, keys, value * 4000, metadata=[b"m" * 1024] * 4000))
    found, cursor, pages = [], 0, 0
    while cursor or not pages:
        _, reply = steps_of(desk.begin(m.List(1, b"", cursor, 4096)))
        encode(reply)
        found += [stat.key for stat in reply.objects]
        cursor, pages = reply.cursor, pages + 1
    assert pages > 1
    assert sorted(found) == keys


def test_a_listing_of_few_among_many_looks_at_so_many_and_pauses_seldom(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.put(*[b"a%d" % i for i in range(127)])
    desk.put(*[b"z%d" % i for i in range(1873)])
    pauses, reply = steps_of(desk.begin(m.List(1, b"a", 0, 4096)))
    assert (len(reply.objects), reply.cursor) == (127, 0)
    assert pauses <= 4
    monkeypatch.setattr(dispatch, "LIST_PAGE_SLOTS", 500)
    _, reply = steps_of(desk.begin(m.List(1, b"z1872", 0, 4096)))
    assert (reply.objects, reply.cursor) == ([], 500)


def test_values_of_more_than_a_message_may_have_are_refused(desk: Desk) -> None:
    values = [memoryview(bytes(64 << 10))] * 18
    with pytest.raises(InvalidRequest, match="limit"):
        desk.ask(m.PutInline(1, [b"%d" % i for i in range(18)], values))


def test_what_has_expired_goes_in_one_turn_however_much_it_is(desk: Desk) -> None:
    keys = [b"%d" % i for i in range(1000)]
    steps_of(desk.begin(m.PutInline(1, keys, [memoryview(b"v")] * 1000, m.Options(ttl_s=1e-9))))
    assert desk.node.sweeper.sweep_once(), "there is more to do"
    pauses, _ = steps_of(desk.node.sweeper.sweep())
    assert pauses > 3
    assert desk.node.catalogue.live == 0
    assert not desk.node.sweeper.sweep_once()


def test_pins_that_came_while_one_waited_count(desk: Desk) -> None:
    desk.put(b"a")
    (full,) = desk.ask(m.Reserve(1, [b"full"], [60 * MIB])).ids
    waiting = desk.begin(m.Reserve(1, [b"pinned"], [20 * MIB], m.Options(pin=2, wait_s=5.0)))
    while next(waiting) is None:
        pass
    desk.begin(m.Abort(0, [full]))
    assert desk.ask(m.Reserve(1, [b"other"], [30 * MIB], m.Options(pin=2))).statuses == [Status.OK]
    _, reply = steps_of(waiting)
    assert reply.statuses == [Status.TOO_LARGE]
    assert desk.node.catalogue.protected_bytes == 30 * MIB


def test_a_session_opened_read_only_is_so_after_a_restart(tmp_path: Path) -> None:
    house = House(tmp_path)
    reader = house.node.roster.open("reader", read_only=True)
    node = house.restart()
    hello = m.Hello(1, 1, 0, [], "", "reader", True, reader.number, reader.token, node.pool_id)
    session, welcome = finish(house.dispatcher.hello(hello))
    assert welcome.resumed
    with pytest.raises(ReadOnly):
        house.dispatcher.serve(session, m.Remove(1, [b"k"]))


def test_a_pool_is_stuck_only_while_writers_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    try:
        server, node = Server(desk.node, loop), desk.node
        now = 1000.0
        monkeypatch.setattr(node.store, "clock", lambda: now)
        node.roster.barrier = np.array([0])
        node.roster.barrier_since = now - 2 * node.config.reconnect_grace_s
        steps_of(desk.begin(m.Reserve(1, [b"a", b"b"], [60 * MIB] * 2, m.Options(wait_s=0.0))))
        assert server._stuck()
        now += REFUSED_RECENTLY_S
        assert not server._stuck()
    finally:
        loop.close()


def test_objects_that_are_gone_are_passed_over_a_thousand_at_a_time(desk: Desk) -> None:
    keys = [b"%d" % i for i in range(4000)]
    desk.put(*keys)
    desk.ask(m.Remove(1, keys))
    desk.put(b"last")
    waiting = desk.node.catalogue.unsummed
    before = len(waiting)
    assert desk.node.checksums.jobs(32) == []
    assert before - len(waiting) == LOOKS_MAX
    while waiting:
        jobs = desk.node.checksums.jobs(32)
    assert {job[:2] for job in jobs} == {_name(desk, b"last")}


def _name(desk: Desk, key: bytes) -> tuple[int, int]:
    slot = desk.node.catalogue.find(key)
    return slot, desk.node.catalogue.generation(slot)


def test_a_suspect_that_goes_before_its_second_reading_is_forgotten(desk: Desk) -> None:
    checksums = desk.node.checksums
    desk.put(b"k")
    ((slot, generation, *_),) = checksums.jobs(1)
    checksums.done(slot, generation, 1)
    checksums.done(slot, generation, 2)
    assert checksums._suspects
    desk.ask(m.Remove(1, [b"k"]))
    assert checksums.jobs(1) == []
    assert not checksums._suspects


def test_nobody_reads_for_a_verification_that_was_given_up(desk: Desk) -> None:
    checksums = desk.node.checksums
    desk.put(b"k")
    ((slot, generation, *_),) = checksums.jobs(1)
    checksums.done(slot, generation, 1)
    verify = desk.begin(m.Verify(1, [b"k"]))
    next(verify)
    verify.close()
    assert checksums.jobs(1) == []
