"""Whatever bytes a connection brings: an error or a closed connection for it, the others served, the node alive.

What would break it: a length that is believed, a field that is used before it is checked, an exception that leaves
half a change behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

import moonpool
from moonpool.testing.node import RunningNode, eventually
from moonpool.testing.records import extents, overlaps
from moonpool.testing.values import generation_of, value_of
from moonpool.wire import messages as m
from moonpool.wire.frames import encode
from tests.faults.processes import in_child
from tests.faults.raw import Raw

SEED = 20_240_607
GOOD = value_of("good", 1, 100_000)
HUGE = 2**63 - 1


@pytest.fixture(autouse=True)
def others_are_served(client: moonpool.Client, shared_node: RunningNode) -> Iterator[None]:
    """Whatever happens in a test, another client's session goes on, and nothing is left behind."""
    pid = shared_node.pid
    client.put("good", GOOD)
    with client.view("good") as views:
        yield
        assert generation_of("good", views[0]) == 1
    assert shared_node.process is not None
    assert shared_node.process.poll() is None
    assert shared_node.pid == pid
    client.set_mode("on")  # a flipped byte may make a message one that switches off, or clears
    client.put("good", GOOD)
    target = bytearray(len(GOOD))
    assert client.get_into("good", target) == len(GOOD)

    def nothing_left() -> bool:
        stats = client.stats()
        return (stats.sessions, stats.pins, stats.reservations, stats.reservations_waiting) == (1, 0, 0, 0)

    eventually(nothing_left, "what the broken connections held is given back")
    assert not overlaps(extents(shared_node.folder))
    assert "Traceback" not in shared_node.log, shared_node.log
    client.clear()
    eventually(lambda: client.stats().live_bytes == 0)
    with client.reserve("all", client.pool_bytes, wait_s=2) as (extent,):
        assert extent.status is moonpool.Status.OK, extent.detail


@pytest.mark.parametrize("hello", [False, True], ids=["before Hello", "after Hello"])
class TestBytes:
    def test_random_bytes(self, shared_node: RunningNode, hello: bool) -> None:
        choose = random.Random(SEED)
        for _ in range(60):
            # The first bytes may have closed the connection already.
            with Raw(shared_node.folder, hello=hello) as raw, suppress(ConnectionError):
                raw.sock.sendall(choose.randbytes(choose.randrange(1, 200)))
                raw.send_body(choose.randbytes(choose.randrange(0, 60)))

    def test_a_length_beyond_the_limit_closes_the_connection_at_once(
        self, shared_node: RunningNode, hello: bool
    ) -> None:
        for length in (m.FRAME_BYTES_MAX + 1, 0xFFFF_FFFF):
            with Raw(shared_node.folder, hello=hello) as raw:
                raw.sock.sendall(length.to_bytes(4, "little"))
                assert str(m.FRAME_BYTES_MAX) in raw.close_reason()

    def test_a_frame_that_never_ends_harms_nobody(self, shared_node: RunningNode, hello: bool) -> None:
        with Raw(shared_node.folder, hello=hello) as raw:
            raw.sock.sendall((4 << 20).to_bytes(4, "little") + bytes(1 << 20))

    def test_a_message_cut_anywhere_harms_nobody(self, shared_node: RunningNode, hello: bool) -> None:
        frame = bytes(encode(m.Reserve(7, [b"cut", b"short"], [5000, 6000])))
        for length in range(1, len(frame), 3):
            with Raw(shared_node.folder, hello=hello) as raw:
                raw.sock.sendall(frame[:length])

    def test_messagepack_that_is_no_message(self, shared_node: RunningNode, hello: bool) -> None:
        nested: object = 1
        for _ in range(900):
            nested = [nested]
        for thing in (
            None,
            1,
            -1,
            "text",
            b"bytes",
            {},
            {"a": 1},
            [],
            [[]],
            nested,
            [1, 2, 3],
            ["1", 5],
            [99, 1],
            [1.5],
        ):
            with Raw(shared_node.folder, hello=hello) as raw:
                raw.send_body(msgspec.msgpack.encode(thing))
                assert raw.close_reason()


def test_messages_flipped_at_random(shared_node: RunningNode) -> None:
    choose = random.Random(SEED)
    messages = [
        m.Reserve(2, [b"a", b"b"], [5000, 70_000]),
        m.PutInline(2, [b"c"], [memoryview(b"value")]),
        m.Commit(2, [1 << 32]),
        m.Acquire(2, [b"good", b"no"], True),
        m.Release(2, [1 << 32]),
        m.Match(2, [m.GroupKeys([b"good"], 0, 0, 1)], "hold"),
        m.Adopt(2, "hold"),
        m.List(2, b"", 0, 10),
        m.Pin(2, [b"c"], 1, 5.0),
        m.Touch(2, [b"c"]),
        m.Stat(2, [b"c"]),
        m.Check(2, [1 << 32]),
        m.Verify(2, [b"no"]),
        m.Statistics(2),
        m.Spaces(2),
    ]

    def send_all() -> None:
        for _ in range(400):
            body = bytearray(encode(choose.choice(messages))[4:])
            for _ in range(choose.randint(1, 3)):
                body[choose.randrange(len(body))] = choose.randrange(256)
            with Raw(shared_node.folder) as raw:
                raw.send_body(bytes(body))

    assert in_child(send_all) == 0  # what the messages got ends with the process


def test_a_reply_is_no_request_and_a_second_hello_is_refused(shared_node: RunningNode) -> None:
    for message in (m.Count(3, 1), m.Hello(3, 1, 0, [], "")):
        with Raw(shared_node.folder) as raw:
            raw.send(message)
            assert raw.close_reason()
    with Raw(shared_node.folder, hello=False) as raw:
        raw.send(m.Statistics(1))
        assert "not Hello" in raw.close_reason()


@pytest.mark.parametrize(
    "message",
    [
        m.Reserve(2, [b"a"], [5000, 5000]),
        m.Reserve(2, [b"a"], [-1]),
        m.Reserve(2, [b"a"], [HUGE]),
        m.Reserve(2, [b"a"], [5000], m.DEFAULT_OPTIONS, [b"", b""]),
        m.Reserve(2, [b"a"], [1 << 30], m.Options(wait_s=float("inf"))),
        m.Reserve(2, [b"a"] * 100, [5000] * 100, m.Options(wait_s=float("nan"), pin=9, priority=-70_000)),
        m.PutInline(2, [b"a", b"b"], [memoryview(b"1")]),
        m.PutInline(2, [b"a"], [memoryview(b"1")], checksums=[-1]),
        m.PutInline(2, [b"b"], [memoryview(b"1")], checksums=[1, 2, 3]),
        m.PutInline(2, [b"c"], [memoryview(bytes(70_000))]),
        m.PutInline(2, [b"d"], [memoryview(b"1")], m.Options(ttl_s=float("inf"), pin=1, pin_ttl_s=float("nan"))),
        m.Commit(2, [0, -1, HUGE, 1 << 32 | 5], [-5]),
        m.Check(2, [0, -1, HUGE]),
        m.Acquire(2, [b"", b"k" * 10_000]),
        m.Pin(2, [b"good"], 300),
        m.Pin(2, [b"good"], -1),
        m.Pin(2, [b"good"], 1, float("nan")),
        m.List(2, b"", -5, -5),
        m.List(2, b"", HUGE, HUGE),
        m.Match(2, [], "hold"),
        m.Match(2, [m.GroupKeys([b"good"], -7, 0, 1)], "hold"),
        m.Match(2, [m.GroupKeys([b"good"], 1, -7, 1)], "hold"),
        m.Match(2, [m.GroupKeys([b"good"], 0, 0, HUGE), m.GroupKeys([b"good"], 0, 0, HUGE - 1)], "hold"),
        m.Match(2, [m.GroupKeys([b"good"], 0, 0, 0)], "hold"),
        m.Match(2, [m.GroupKeys([b"good"], 0, 0, 1)], "h" * 300),
        m.Adopt(2, ""),
        m.ReleaseHold(2, "none"),
        m.Declare(2, b"short", b"{}"),
        m.Declare(2, b"d" * 16, b"x" * 70_000),
        m.Declare(2, b"e" * 16, b"\xff not json"),
        m.Purge(2, [b"unknown"]),
        m.Purge(2, [], "model", "tenant", float("nan")),
        m.SetMode(2, -1),
        m.Verify(2, [b"", b"no"]),
    ],
    ids=lambda message: f"{type(message).__name__}",
)
def test_values_out_of_range_are_refused_or_mean_nothing(
    client: moonpool.Client, shared_node: RunningNode, message: m.Message
) -> None:
    before = client.stats().protected_bytes
    with Raw(shared_node.folder) as raw:
        answer = raw.ask(message)
        if isinstance(answer, m.Refused):
            assert "internal error" not in answer.text, answer.text
        assert isinstance(raw.ask(m.Spaces(3)), m.SpaceList), "the connection goes on"
    if not isinstance(message, m.PutInline):
        assert client.stats().protected_bytes == before


def test_an_id_is_worth_nothing_to_another_session(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.view("good"), client.reserve("mine", 5000) as (extent,), Raw(shared_node.folder) as raw:
        ids = [found.slot | found.generation << 32 for found in extents(shared_node.folder)]
        raw.send(m.Release(0, ids))
        raw.send(m.Abort(0, ids))
        answer = raw.ask(m.Commit(2, [extent.number]))
        assert isinstance(answer, m.StatusReply)
        assert answer.statuses == [moonpool.Status.STALE]
        stats = client.stats()
        assert (stats.pins, stats.reservations) == (1, 1)
    assert client.exists("mine")


def test_a_session_is_taken_up_only_with_its_token_and_only_with_what_it_had(
    client: moonpool.Client, shared_node: RunningNode
) -> None:
    with client.view("good") as views, Raw(shared_node.folder) as raw:
        number = next(e.slot | e.generation << 32 for e in extents(shared_node.folder) if e.key == b"good")
        pool_id, session, token = raw.welcome.pool_id, raw.welcome.session, raw.welcome.token
        victim = session - 1

        def hello(session: int, token: bytes, pins: list[tuple[int, int]], reservations: list[int]) -> m.Hello:
            return m.Hello(1, 1, 0, [], "", "raw", False, session, token, pool_id, pins, reservations)

        for guess in (b"", b"t" * 16, token):
            with Raw(shared_node.folder, hello=False) as thief:
                welcome = thief.ask(hello(victim, guess, [(number, 1)], [number]))
                assert isinstance(welcome, m.Welcome)
                assert not welcome.resumed
                assert welcome.session != victim
        pins = [(number, 1), (number, HUGE), (number, 2**40), (number, -5), (HUGE, 1), (-1, 1)]
        with Raw(shared_node.folder, hello=False) as again:
            welcome = again.ask(hello(session, token, pins, [HUGE, -1]))
            assert isinstance(welcome, m.Welcome)
            assert welcome.resumed
            assert client.stats().pins == 2
        assert generation_of("good", views[0]) == 1
        eventually(lambda: client.stats().pins == 1)


def test_more_keys_than_a_message_may_have_are_refused(shared_node: RunningNode) -> None:
    for message in (
        m.Acquire(2, [b"k"] * 500_000),
        m.Remove(2, [b"k"] * 500_000),
        m.Release(2, [5] * 500_000),
        m.Reserve(2, [b"%d" % i for i in range(5000)], [4096] * 5000),
    ):
        with Raw(shared_node.folder) as raw:
            answer = raw.ask(message)
            assert isinstance(answer, m.Refused)
            assert "4096" in answer.text


def test_a_client_that_reads_no_replies_is_cut_off(client: moonpool.Client, shared_node: RunningNode) -> None:
    def send_and_never_read() -> None:
        with Raw(shared_node.folder) as raw:
            try:
                for _ in range(100_000):
                    raw.send(m.Acquire(2, [b"good"] * 1000))
            except OSError:
                return
        raise AssertionError("the node took in everything")

    assert in_child(send_and_never_read) == 0
    assert client.get("good") is not None


def test_many_requests_that_wait_are_bounded(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("all but", client.pool_bytes - (4 << 20)), Raw(shared_node.folder) as raw:
        for number in range(400):
            raw.send(m.Reserve(number + 2, [b"%d" % number], [16 << 20], m.Options(wait_s=1.0)))
        answers = [raw.answer() for _ in range(400)]
        refused = [answer for answer in answers if isinstance(answer, m.Refused)]
        assert 0 < len(refused) < 400
        assert all("waiting already" in answer.text for answer in refused)
