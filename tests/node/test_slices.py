"""Requests of thousands of keys: served some at a time, with others in between, in order, and answered as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.folder.layout import RECORD_WORDS, Field
from moonpool.node.connection import FRAMES_PER_STEP, Connection
from moonpool.node.server import Server
from moonpool.node.sessions import Session
from moonpool.node.slices import SLICE, Whole, cut
from moonpool.node.steps import finish
from moonpool.status import Status
from moonpool.wire import messages as m
from moonpool.wire.frames import FrameReader, decode_reply, encode
from tests.node.desk import Desk, steps_of

KEYS = [b"%d" % i for i in range(m.KEYS_MAX)]
KINDS = ["commit", "abort", "acquire", "release", "check", "remove", "touch", "pin", "unpin", "stat"]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def request_of(desk: Desk, kind: str) -> m.Message:
    """A request of this kind for all of `KEYS`, and what it takes for that to do something."""
    if kind in ("commit", "abort"):
        ids = desk.ask(m.Reserve(1, KEYS, [1] * len(KEYS))).ids
        return m.Commit(1, ids, [7] * len(ids), 0.5) if kind == "commit" else m.Abort(1, ids)
    desk.put(*KEYS)
    if kind in ("release", "check"):
        ids = desk.ask(m.Acquire(1, KEYS)).ids
        return m.Release(1, ids, 0.5) if kind == "release" else m.Check(1, ids)
    kinds = {"acquire": m.Acquire, "remove": m.Remove, "touch": m.Touch, "stat": m.Stat}
    return kinds[kind](1, KEYS) if kind in kinds else m.Pin(1, KEYS, 2 * (kind == "pin"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_works_on_more_than_a_slice_and_others_are_served_between_two(desk: Desk, kind: str) -> None:
    request, other = request_of(desk, kind), desk.node.roster.open("other", read_only=False)
    desk.put(b"other's")
    served: list[int] = []
    handler = desk.dispatcher._by_key[type(request)]

    def counted(session: Session, part: Any, place: int) -> m.Message | None:
        if session is desk.session:
            served[-1] += len(getattr(part, "keys", ()) or part.ids)
        return handler(session, part, place)

    desk.dispatcher._by_key[type(request)] = counted
    steps = desk.begin(request)
    while True:
        served.append(0)
        try:
            next(steps)
        except StopIteration as end:
            reply = end.value
            break
        held = desk.ask(m.Acquire(1, [b"other's"]), other)
        assert held.statuses == [Status.OK]
        desk.ask(m.Release(0, held.ids), other)
    assert max(served) == SLICE[type(request)] <= 512
    assert sum(served) == len(KEYS)
    if kind == "release":
        assert reply is None
    elif kind == "abort":
        assert reply == m.Count(1, len(KEYS))
    elif kind == "stat":
        assert [stat.key for stat in reply.objects] == KEYS
    else:
        assert reply.statuses == [Status.OK] * len(KEYS)


def test_what_was_done_in_slices_is_done(desk: Desk) -> None:
    finish(desk.begin(request_of(desk, "commit")))
    stats = desk.ask(m.Stat(1, KEYS)).objects
    assert {stat.checksum for stat in stats} == {7}
    held = desk.ask(m.Acquire(1, KEYS))
    assert [number & 0xFFFF_FFFF for number in held.ids] == [desk.node.catalogue.find(key) for key in KEYS]
    assert {stat.pins for stat in desk.ask(m.Stat(1, KEYS)).objects} == {1}
    desk.ask(m.Release(0, held.ids))
    assert desk.session.idle
    assert {stat.pins for stat in desk.ask(m.Stat(1, KEYS)).objects} == {0}
    assert desk.ask(m.Remove(1, [*KEYS[:200], KEYS[0]])).statuses == [Status.OK] * 200 + [Status.MISS]
    assert desk.node.catalogue.live == len(KEYS) - 200


@pytest.mark.parametrize("kind", ["commit", "acquire", "touch"])
def test_a_long_chain_is_touched_tail_to_head(desk: Desk, kind: str) -> None:
    finish(desk.begin(request_of(desk, kind)))
    catalogue = desk.node.catalogue
    assert [catalogue.records.key(slot) for slot in catalogue.space.oldest()] == KEYS[::-1]
    touched = [catalogue.floats[catalogue.find(key) * RECORD_WORDS + Field.TOUCHED] for key in KEYS]
    assert touched == sorted(touched, reverse=True), "and so a restart finds them"


def test_a_batch_counts_once_in_the_metrics_however_it_was_cut(desk: Desk) -> None:
    finish(desk.begin(request_of(desk, "commit")))
    desk.ask(m.Release(0, desk.ask(m.Acquire(1, KEYS)).ids, 0.25))
    stages = desk.node.catalogue.counters.stages
    assert {name[:2]: found.count for name, found in stages.items()} == {
        ("put", "allocate"): 1,
        ("put", "transfer"): 1,
        ("put", "commit"): 1,
        ("get", "query"): 1,
        ("get", "transfer"): 1,
    }
    assert stages["get", "transfer", 0].total == 0.25
    assert desk.node.catalogue.counters.hits.total() == len(KEYS)


def test_details_keep_their_places_and_the_first_epoch_counts() -> None:
    whole = Whole(300)
    whole.add(256, m.StatusReply(1, [1] * 44, {3: "late"}))
    whole.add(0, m.StatusReply(1, [0] * 256, {5: "early"}))
    assert whole.reply() == m.StatusReply(1, [0] * 256 + [1] * 44, {5: "early", 259: "late"})
    empty = [0] * 128
    whole = Whole(256)
    for start, epoch in ((128, 1), (0, 2)):
        whole.add(start, m.Acquired(1, empty, empty, empty, empty, empty, empty, epoch))
    reply = whole.reply()
    assert isinstance(reply, m.Acquired)
    assert reply.epoch == 1, "a purge that came in between is noticed"


def test_where_the_order_of_keys_tells_which_are_refused_it_is_kept(desk: Desk) -> None:
    assert [start for start, _ in cut(m.Pin(1, KEYS, 2))] == list(range(0, len(KEYS), SLICE[m.Pin]))
    assert [start for start, _ in cut(m.Touch(1, KEYS))] == list(range(0, len(KEYS), SLICE[m.Touch]))[::-1]


def test_a_long_get_that_is_broken_off_holds_nothing(desk: Desk) -> None:
    desk.put(*KEYS)
    steps = desk.begin(m.Acquire(1, KEYS))
    for _ in range(3):
        next(steps)
    assert len(desk.session.pins) == 3 * SLICE[m.Acquire]
    steps.close()
    pauses, _ = steps_of(desk.background.pop())
    assert pauses > 10, "given back in slices too"
    assert desk.session.idle
    assert {stat.pins for stat in desk.ask(m.Stat(1, KEYS)).objects} == {0}


def test_what_a_client_has_declared_since_is_not_taken_back(desk: Desk) -> None:
    desk.put(*KEYS)
    (number,) = desk.ask(m.Acquire(1, KEYS[-1:])).ids
    steps = desk.begin(m.Acquire(1, KEYS))
    next(steps)
    assert desk.pins(KEYS[-1]) == 2
    finish(desk.node.roster.resume(desk.session.number, desk.session.token, [(number, 1)], []))
    steps.close()
    for background in desk.background:
        finish(background)
    assert desk.session.pins == {number: 1}
    assert desk.pins(KEYS[-1]) == 1


class Wire:
    """A client's end of a connection that has no socket: frames in, replies out."""

    def __init__(self, server: Server, log: list[tuple[str, m.Message]], name: str) -> None:
        self.log, self.name, self.frames, self.paused = log, name, FrameReader(), False
        self.connection = Connection(server, None, 0)
        self.connection.connection_made(self)  # type: ignore[arg-type]
        self.send(m.Hello(1, 1, 0, [], "", name))

    def send(self, *messages: m.Message) -> None:
        self.connection.data_received(b"".join(map(encode, messages)))

    def write(self, data: bytes) -> None:
        self.log += [(self.name, decode_reply(bytes(body))) for body in self.frames.feed(data)]

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_a_connections_requests_stay_in_order_while_others_are_served(
    desk: Desk, loop: asyncio.AbstractEventLoop
) -> None:
    server, log = Server(desk.node, loop), list[tuple[str, m.Message]]()
    first, other = Wire(server, log, "first"), Wire(server, log, "other")
    first.send(m.Reserve(2, KEYS, [1] * len(KEYS)))
    for _ in range(100):
        loop.run_until_complete(asyncio.sleep(0))
    reserved = log[-1][1]
    assert isinstance(reserved, m.Reserved)
    log.clear()
    first.send(m.Commit(3, reserved.ids), m.Acquire(4, KEYS), m.Touch(0, KEYS), m.Stat(5, KEYS[-1:]))
    other.send(m.Stat(6, KEYS[:1]))
    other.send(m.Stat(7, KEYS[-1:]))
    for _ in range(200):
        loop.run_until_complete(asyncio.sleep(0))
    assert [(name, reply.id) for name, reply in log] == [
        ("other", 6), ("other", 7), ("first", 3), ("first", 4), ("first", 5),
    ]  # fmt: skip
    found = {reply.id: reply for _, reply in log}
    acquired, earliest = found[4], found[6]
    assert isinstance(acquired, m.Acquired)
    assert isinstance(earliest, m.Stats)
    assert acquired.statuses == [Status.OK] * len(KEYS), "all of the commit came before any of the get"
    assert earliest.objects == [None], "the first key's commit came last"


def test_a_flood_of_small_requests_is_cut_and_read_only_as_it_is_served(
    desk: Desk, loop: asyncio.AbstractEventLoop
) -> None:
    server, log = Server(desk.node, loop), list[tuple[str, m.Message]]()
    wire = Wire(server, log, "flood")
    log.clear()
    flood = [m.Stat(i, [b"k"]) for i in range(2, 5000)]
    wire.send(m.Touch(0, KEYS), *flood)
    assert wire.paused, "what has come in is not served yet"
    assert not log
    assert len(wire.connection._backlog) < FRAMES_PER_STEP
    turns = 0
    while len(log) < len(flood):
        loop.run_until_complete(asyncio.sleep(0))
        turns += 1
        assert len(wire.connection._backlog) <= FRAMES_PER_STEP
    assert turns > 5
    assert [reply.id for _, reply in log] == [request.id for request in flood]
    loop.run_until_complete(asyncio.sleep(0))
    assert not wire.paused
