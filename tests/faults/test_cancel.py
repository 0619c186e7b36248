"""A request whose caller has gone: its wait in the node ends, and whatever it is given goes back, in either order.

What would break it: a wait that goes on for nobody, a key that stays reserved for one, a `Cancel` that is served before
the request's own end or taken for another's, a node of the version before that is sent one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

import moonpool
from moonpool import Group, Status
from moonpool.client.link import SocketLink
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.wire import messages as m
from tests.client.test_interrupts import interrupted
from tests.faults.raw import Raw

LARGE = 30 << 20  # of the node's 32 MiB
WAIT = m.Options(wait_s=5.0, wait_for_others=True)
pytestmark = pytest.mark.timeout(60, method="thread")  # the other method's signal is ours here


def waiting(client: moonpool.Client) -> int:
    return client.stats().reservations_waiting


def test_a_wait_for_space_ends_and_gives_back_what_it_had(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("all", LARGE), Raw(shared_node.folder) as raw:
        raw.send(m.Reserve(2, [b"had", b"wanted"], [5000, LARGE], WAIT))
        eventually(lambda: waiting(client) == 1)
        assert client.put("had", b"value") is Status.IN_PROGRESS
        raw.send(m.Cancel(0, 2))
        # Served in order: whatever the same client asks now finds both keys free.
        raw.send(m.Reserve(3, [b"had", b"wanted"], [5000, 5000]))
        cancelled, granted = raw.answer(), raw.answer()
        assert isinstance(cancelled, m.Refused)
        assert (cancelled.id, cancelled.kind) == (2, "Cancelled")
        assert isinstance(granted, m.Reserved)
        assert granted.statuses == [Status.OK, Status.OK]
        stats = client.stats()
        assert (stats.reservations, stats.reservations_waiting) == (3, 0)


def test_who_waited_for_the_cancelled_one_goes_on(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("all", LARGE), Raw(shared_node.folder) as first, Raw(shared_node.folder) as second:
        first.send(m.Reserve(2, [b"had", b"wanted"], [5000, LARGE], WAIT))
        eventually(lambda: waiting(client) == 1)
        second.send(m.Reserve(2, [b"had", b"wanted"], [5000, 5000], WAIT))
        eventually(lambda: waiting(client) == 2)
        first.send(m.Cancel(0, 2))
        granted = second.answer()
        assert isinstance(granted, m.Reserved)
        assert granted.statuses == [Status.OK, Status.OK]


def test_a_wait_for_another_writer_ends(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("key", 5000) as (extent,), Raw(shared_node.folder) as raw:
        raw.send(m.Reserve(2, [b"key"], [5000], WAIT))
        eventually(lambda: waiting(client) == 1)
        raw.send(m.Cancel(0, 2))
        assert isinstance(raw.answer(), m.Refused)
        assert waiting(client) == 0
        extent.buffer[:] = 1  # type: ignore[index]
    assert client.exists("key")


def test_after_the_answer_it_changes_nothing(client: moonpool.Client, shared_node: RunningNode) -> None:
    client.put("there", b"value")
    with Raw(shared_node.folder) as raw:
        granted = raw.ask(m.Reserve(2, [b"key"], [5000], WAIT))
        pinned = raw.ask(m.Acquire(3, [b"there"]))
        assert isinstance(granted, m.Reserved)
        assert isinstance(pinned, m.Acquired)
        for number in (2, 3, 77):  # the last was never sent
            raw.send(m.Cancel(0, number))
        assert raw.ask(m.Commit(4, granted.ids)) == m.StatusReply(4, [Status.OK])
        assert client.stats().pins == 1
        raw.send(m.Release(0, pinned.ids))
    eventually(lambda: client.stats().pins == 0)


def test_one_client_does_not_cancel_anothers(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("all", LARGE), Raw(shared_node.folder) as first, Raw(shared_node.folder) as second:
        first.send(m.Reserve(2, [b"wanted"], [LARGE], WAIT))
        eventually(lambda: waiting(client) == 1)
        second.send(m.Cancel(0, 2))
        assert isinstance(second.ask(m.Statistics(3)), m.StatisticsReply)
        assert waiting(client) == 1


def reserve_large(client: moonpool.Client) -> Callable[[], object]:
    return lambda: client.reserve_many(["had", "wanted"], [5000, LARGE], wait_s=5)


def test_an_interrupted_clients_wait_ends_at_once(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("all", LARGE), shared_node.connect() as own:
        link = own.link
        assert isinstance(link, SocketLink)
        channel = link._channel
        for _ in range(5):
            assert interrupted(reserve_large(own), 0.05)
            assert waiting(own) == 0
            assert own.put("had", b"value", wait_s=0) is Status.OK
            own.remove("had")
        assert link._channel is channel, "the connection has outlived it"
    assert client.stats().no_space == 0, "no wait has lasted as long as it might have"


def test_an_interrupt_of_one_who_waits_while_another_reads(client: moonpool.Client, shared_node: RunningNode) -> None:
    """The interrupted thread isn't the one that reads the socket: that one goes on."""
    with client.reserve("all", LARGE), shared_node.connect() as own:
        with client.reserve("key", 5000):
            reader = threading.Thread(target=lambda: own.reserve("key", 5000, wait_s=5, wait_for_others=True).abort())
            reader.start()
            eventually(lambda: waiting(client) == 1)
            assert interrupted(reserve_large(own), 0.05)
            assert waiting(client) == 1
            assert own.put("had", b"value", wait_s=0) is Status.OK
        reader.join()
    eventually(lambda: client.stats().reservations == 0)


def test_an_answer_that_was_under_way_already_is_given_back(node: RunningNode) -> None:
    with node.connect() as client, node.connect(timeout_s=20) as own:
        client.put("there", b"value")
        calls: list[Callable[[], object]] = [
            lambda: own.reserve_many(["a", "b"], [5000, 70_000], wait_s=5),
            lambda: own.view("there"),
            lambda: own.match([Group(["there"])], hold="hold"),
        ]
        for call in calls:
            own.stats()
            node.signal(signal.SIGSTOP)
            try:
                assert interrupted(call, 0.1)
            finally:
                node.signal(signal.SIGCONT)
            eventually(lambda: (own.stats().pins, own.stats().reservations, own.stats().holds) == (0, 0, 0))
            assert own.put_many(["a", "b"], [b"value"] * 2).all_ok, "nobody has reserved them"
            own.remove_many(["a", "b"])


def test_a_node_of_the_version_before_is_not_sent_what_it_does_not_know() -> None:
    with running_node("32MiB", environment={"MOONPOOL_TEST": "protocol=1.0"}) as node, node.connect() as client:
        with node.connect() as own, client.reserve("all", LARGE):
            assert interrupted(lambda: own.reserve("wanted", LARGE, wait_s=1), 0.05)
            # It would have been served before this.
            assert own.stats().reservations_waiting == 1
            eventually(lambda: waiting(client) == 0)
        eventually(lambda: client.stats().reservations == 0)


def test_a_request_that_timed_out_waits_no_longer(client: moonpool.Client, shared_node: RunningNode) -> None:
    with client.reserve("all", LARGE), shared_node.connect(timeout_s=0.3) as own:
        with pytest.raises(moonpool.RequestTimeout):
            own.reserve("wanted", LARGE, wait_s=5)
        eventually(lambda: waiting(client) == 0)
        with suppress(moonpool.NodeUnavailable):  # until the answer to the cancelled one is there
            own.stats()
        eventually(lambda: own.link.connected)
        assert own.put("wanted", b"value", wait_s=0) is Status.OK
