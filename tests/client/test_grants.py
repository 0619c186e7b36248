"""What a reply gives belongs to an object: let go of it in any way, and the node has it back, once.

What would break it: something that is given back by a `finally` alone, given back twice, or kept by a cycle of
references, or a reservation that ends under an array of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import Group, Status
from moonpool.client.link import SocketLink
from moonpool.testing.node import RunningNode, eventually
from moonpool.wire import messages as m

torch = pytest.importorskip("torch")


def held(client: moonpool.Client) -> tuple[int, int, int]:
    stats = client.stats()
    return stats.pins, stats.reservations, stats.holds


def test_dropped_requests_give_back_what_they_get(client: moonpool.Client, shared_node: RunningNode) -> None:
    client.put_many(["a", "b"], [b"value"] * 2)
    requests: list[m.Message] = [
        m.Acquire(0, [b"a", b"b", b"absent"]),
        m.Acquire(0, [b"a"], True),
        m.Reserve(0, [b"c", b"d"], [5000, 5000]),
        m.Match(0, [m.GroupKeys([b"a", b"b"], 0, 0, 1)], "hold"),
    ]
    with shared_node.connect() as own:
        for request in requests:
            own.link.exchange(request)
            eventually(lambda: held(client) == (0, 0, 0))
            own.link.begin(request)  # its answer comes when nobody is there for it any more
            eventually(lambda: held(client) == (0, 0, 0))


def test_what_is_given_back_twice_is_given_back_once(client: moonpool.Client, shared_node: RunningNode) -> None:
    client.put("key", b"value")

    def pins() -> int:
        found = client.stat("key")
        assert found is not None
        return found.pins

    with shared_node.connect() as own, own.view("key"):
        _, grant = own.link.exchange(m.Acquire(0, [b"key", b"key"]))
        assert pins() == 3
        own.link.give_back(grant, [0])
        own.link.give_back(grant, [0])
        eventually(lambda: pins() == 2)
        own.link.give_back(grant)
        own.link.give_back(grant)
        del grant
        own.link.flush()
        eventually(lambda: pins() == 1, "the view's own")
    assert client.stats().stale_ids == 0


def test_more_than_fit_into_a_message_are_given_back(client: moonpool.Client, shared_node: RunningNode) -> None:
    keys = [f"key {i}" for i in range(m.KEYS_MAX + 500)]
    client.put_many(keys, [b"v"] * len(keys))
    with shared_node.connect() as own:
        assert own.match([Group(keys)], hold="hold").length == len(keys)
        _, grant = own.link.exchange(m.Adopt(0, "hold"))
        assert own.release_hold("hold")
        assert own.stats().pins == len(keys)
        own.link.give_back(grant)
        assert own.stats().pins == 0


@pytest.mark.parametrize(
    "made",
    [
        lambda buffer: buffer,
        lambda buffer: buffer[100:][:10],
        lambda buffer: memoryview(buffer),
        lambda buffer: torch.from_numpy(buffer)[64:],
    ],
    ids=["array", "slice", "memoryview", "tensor"],
)
def test_dropped_reservations_are_aborted_when_their_last_array_is_gone(
    client: moonpool.Client, made: Callable[[Any], Any]
) -> None:
    kept = made(client.reserve_many(["a", "b"], [5000, 5000])[1].buffer)
    client.link.flush()
    assert client.stats().reservations == 2
    assert client.put("a", b"value") is Status.IN_PROGRESS
    del kept
    client.link.flush()
    assert client.stats().reservations == 0
    assert client.put_many(["a", "b"], [b"value"] * 2).all_ok


def test_an_array_that_outlives_its_reservation_keeps_nothing(client: moonpool.Client) -> None:
    with client.reserve("a", 5000) as (extent,):
        kept = extent.buffer
        assert kept is not None
        kept[:] = 7
    assert client.get("a") == bytes([7]) * 5000
    del kept
    client.link.flush()
    assert client.get("a") == bytes([7]) * 5000
    assert held(client) == (0, 0, 0)


def test_a_match_asked_again_keeps_what_the_dropped_one_has_made(client: moonpool.Client) -> None:
    client.put_many(["a", "b"], [b"value"] * 2)
    groups = [Group(["a", "b"])]
    for _ in range(20):
        client.begin_match(groups, "hold")  # dropped
        assert client.match(groups, hold="hold").length == 2
        client.link.flush()
        assert client.stats().holds == 1
        client.begin_match(groups, "hold")  # dropped: it had not made the hold
        client.link.flush()
        assert client.stats().holds == 1
        assert client.release_hold("hold")


def test_what_was_given_before_the_connection_broke_is_given_back_after(
    client: moonpool.Client, shared_node: RunningNode
) -> None:
    client.put_many(["key", "other"], [b"value"] * 2)
    with shared_node.connect() as own:
        link = own.link
        assert isinstance(link, SocketLink)
        kept, dropped = own.view("key"), own.view("other")
        extents, gone = own.reserve("a", 5000), own.reserve("b", 5000)
        assert held(client) == (2, 2, 0)
        assert link._channel is not None
        link._channel.fail("for the test")
        del dropped, gone
        eventually(lambda: link.connected)
        eventually(lambda: held(client) == (1, 1, 0))
        assert kept[0] is not None
        assert kept[0].tobytes() == b"value"
        assert extents[0].buffer is not None
        extents[0].buffer[:] = np.uint8(1)
        assert extents.commit() == [Status.OK]
        kept.close()
        assert held(own) == (0, 0, 0)
