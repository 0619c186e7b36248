"""Purges and what time ends: effective at once for whoever asks, freed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest

import moonpool
from moonpool import Group, Status
from moonpool.testing.conformance_node import a_space
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.values import generation_of, value_of
from moonpool.wire import messages as m
from tests.faults.raw import Raw

MIB = 1 << 20


def test_a_get_that_began_before_a_purge_reports_a_miss(
    client: moonpool.Client, shared_node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = a_space("purged")
    client.declare(space)
    key = space.key(b"1" * 32)
    client.put_many([key, b"other"], [value_of("k", 1, MIB)] * 2)
    with shared_node.connect() as operator:
        copy = client.copier.copy

        def purge_in_between(pairs: Sequence[Any]) -> None:
            copy(pairs)
            assert operator.purge(space=space) == 1

        monkeypatch.setattr(client.copier, "copy", purge_in_between)
        statuses = client.get_many_into([key, b"other"], [bytearray(MIB), bytearray(MIB)])
        assert statuses == [Status.MISS, Status.OK]


def test_a_get_under_which_the_object_is_removed_reports_a_miss(
    client: moonpool.Client, shared_node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_many(["a", "b"], [value_of(key, 1, MIB) for key in "ab"])
    with shared_node.connect() as other:
        copy = client.copier.copy

        def remove_in_between(pairs: Sequence[Any]) -> None:
            other.remove("a")
            other.put("a", value_of("a", 2, MIB))
            copy(pairs)

        monkeypatch.setattr(client.copier, "copy", remove_in_between)
        assert client.get_many_into(["a", "b"], [bytearray(MIB), bytearray(MIB)]) == [Status.MISS, Status.OK]


def test_a_view_that_began_before_a_purge_keeps_its_bytes(client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, MIB))
    with client.view("key") as views:
        assert client.clear() == 1
        assert not client.exists("key")
        assert client.put("key", value_of("key", 2, MIB)) is Status.OK
        assert generation_of("key", views[0]) == 1
    assert generation_of("key", client.get("key")) == 2


def test_ttls_and_soft_pins_end_without_anybody_asking() -> None:
    with running_node("16MiB") as node, node.connect() as client:
        client.put_many([f"key {i}" for i in range(100)], [bytes(10_000)] * 100, ttl_s=0.2)
        client.put("soft", bytes(MIB), pin="soft", pin_ttl_s=0.2)
        assert client.stats().protected_bytes == MIB
        eventually(lambda: client.stats().objects == 1)
        assert client.stats().removals["expired"] == 100
        eventually(lambda: client.stats().protected_bytes == 0)
        eventually(lambda: client.exists_many(["key 1", "soft"]) == [False, True])


def test_a_purge_whose_asker_is_gone_is_swept_all_the_same() -> None:
    with running_node("64MiB", slots=1_000_000, prefault=False) as node, node.connect() as client:
        client.put_many([f"{i}" for i in range(4000)], [b"v"] * 4000)
        for _ in range(3):
            with Raw(node.folder) as raw:
                raw.send(m.Clear(2))
                raw.sock.close()
        eventually(lambda: client.stats().live_bytes == 0)
        assert client.put("after", b"value") is Status.OK
        assert client.get("after") == b"value"


def test_the_mode_reaches_running_clients_at_once(client: moonpool.Client, shared_node: RunningNode) -> None:
    client.put("key", b"value")
    with shared_node.connect() as operator:
        operator.set_mode("off")
        assert not client.exists("key"), "from the shared header, without a message"
        assert client.prefix_length(["key"]) == 0
        assert client.match([Group(["key"])], hold="h").length == 0
        assert client.get("key") is None
        assert client.put("new", b"value") is Status.DISABLED
        assert client.mode() == "off"
        operator.set_mode("on")
    assert client.get("key") == b"value"


def test_a_hold_ends_with_the_session_that_made_it_and_may_be_ended_by_others(
    client: moonpool.Client, shared_node: RunningNode
) -> None:
    keys = [f"block {i}" for i in range(3)]
    client.put_many(keys, [value_of(key, 1, MIB) for key in keys])
    scheduler = shared_node.connect(name="scheduler")
    assert scheduler.match([Group(keys)], hold="request 1").hold == "request 1"
    assert scheduler.match([Group(keys)], hold="request 2").hold == "request 2"
    with client.adopt("request 1") as views:
        assert len(views) == 3
        assert client.release_hold("request 1"), "a worker ends what the scheduler made"
        client.remove_many(keys)
        assert [generation_of(key, array) for key, array in zip(keys, views, strict=True)] == [1, 1, 1]
    assert client.stats().holds == 1
    assert client.stats().doomed == 3, "the other hold keeps them"
    scheduler.close()
    eventually(lambda: client.stats().holds == 0 == client.stats().doomed)


def test_a_subscriber_that_falls_behind_is_told_and_takes_a_snapshot() -> None:
    with running_node("64MiB", feed_events=1024) as node, node.connect() as client:
        with client.subscribe() as feed:
            for round_ in range(20):
                keys = [b"%048d" % (round_ * 4000 + i) for i in range(4000)]
                client.put_many(keys, [b"v"] * 4000, metadata=b"m" * 100)
            last = ""
            sequence = 0
            for event in feed:
                assert event.kind == "lagged" or event.sequence == sequence + 1 or not sequence, "none is left out"
                sequence, last = event.sequence, event.kind
            assert last == "lagged"
        with client.subscribe(snapshot=True) as feed:
            kinds = list(takewhile(lambda kind: kind != "snapshot-end", (event.kind for event in feed)))
        assert kinds == ["snapshot"] * client.stats().objects
        assert client.stats().feed_subscribers == 0 or eventually(lambda: client.stats().feed_subscribers == 0)
