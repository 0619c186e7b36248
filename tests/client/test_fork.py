"""A forked child has no part in its parent's session: it closes what it inherited, and connects afresh when used."""

from __future__ import annotations

import pytest

import moonpool
from moonpool.testing.node import RunningNode, eventually
from moonpool.testing.values import generation_of, value_of
from tests.faults.processes import in_child

LARGE_BYTES = 9 << 20  # copied by several threads, which a child doesn't inherit


@pytest.mark.timeout(30)
def test_a_child_uses_the_client_over_a_session_of_its_own(client: moonpool.Client, shared_node: RunningNode) -> None:
    client.put("key", value_of("key", 1, LARGE_BYTES))
    client.get_into("key", bytearray(LARGE_BYTES))  # the copying threads run now
    before = client.stats().sessions_ended

    def child() -> None:
        target = bytearray(LARGE_BYTES)
        assert client.get_into("key", target) == LARGE_BYTES
        assert generation_of("key", target) == 1
        client.put("child's", target)
        assert client.stats().sessions == 2

    assert in_child(child) == 0
    assert generation_of("key", client.get("key")) == 1
    eventually(lambda: client.stats().sessions == 1, "the child's session ended with it")
    ended = client.stats().sessions_ended
    assert sum(ended.values()) == sum(before.values()) + 1, "and the parent's did not"


def test_a_child_gives_back_nothing_of_its_parents(client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, 100_000))
    with client.view("key") as views, client.reserve("filling", 5000) as (extent,):

        def child() -> None:
            views.close()
            extent.abort()
            client.close()

        assert in_child(child) == 0
        stats = client.stats()
        assert (stats.pins, stats.reservations, stats.sessions) == (1, 1, 1)
        assert generation_of("key", views[0]) == 1
    assert client.exists("filling")


def test_a_child_that_does_nothing_leaves_the_parents_session_alone(client: moonpool.Client) -> None:
    client.put("key", b"value")
    assert in_child(lambda: None) == 0
    assert client.get("key") == b"value"
    assert client.stats().sessions == 1


def test_an_embedded_store_is_the_childs_own_copy() -> None:
    with moonpool.connect("embedded:16MiB") as client:
        client.put("key", b"value")

        def child() -> None:
            assert client.get("key") == b"value"
            client.remove("key")

        assert in_child(child) == 0
        assert client.get("key") == b"value"
