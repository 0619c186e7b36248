"""A restart keeps everything: what was stored, how it was protected, and in which order it was used."""

from __future__ import annotations

import time

import pytest

import moonpool
from moonpool import Status
from moonpool.testing.conformance_node import a_space
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.values import generation_of, value_of
from moonpool.wire import messages as m
from tests.faults.raw import Raw

MIB = 1 << 20
LENGTHS = (1, 15, 16, 47, 48, 49, 63, 64, 65, 128, 255, 256)


def key_of(length: int) -> bytes:
    return bytes((length * 7 + i) % 256 for i in range(length))


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_it_keeps_every_object_with_all_that_is_known_of_it(node: RunningNode, kill: bool) -> None:
    space = a_space("kept", model="m")
    spaced = space.keys([bytes([i]) * 32 for i in range(3)])
    with node.connect(name="writer") as client:
        client.declare(space)
        for length in LENGTHS:
            key = key_of(length)
            assert client.put(key, value_of(key, length, 5000 + length), metadata=b"m" * (4 * length)) is Status.OK
        client.put_many(spaced, [value_of(key, 1, 100_000) for key in spaced])
        client.put("hard", value_of("hard", 1, MIB), pin="hard", priority=9)
        client.put("soft", value_of("soft", 1, MIB), pin="soft", pin_ttl_s=600)
        client.put("short", b"value", ttl_s=0.3)
        client.put("long", b"value", ttl_s=600)
        client.put("summed", value_of("summed", 1, 1000), checksum=12345)
        keys = [*map(key_of, LENGTHS), *spaced, b"hard", b"soft", b"long", b"summed"]
        # Checksums come in the background; wait for them, so that before and after can be compared.
        eventually(lambda: all(stat is not None and stat.has_checksum for stat in client.stat_many(keys)))
        before = client.stat_many(keys)
        stats = client.stats()
    time.sleep(0.3)
    node.restart(kill=kill)
    with node.connect(name="reader") as client:
        after = client.stat_many(keys)
        for was, found in zip(before, after, strict=True):
            assert was is not None
            assert found is not None
            for field in ("key", "size", "generation", "space", "created", "touched", "expiry", "checksum", "pin",
                          "pin_expiry", "priority", "metadata"):  # fmt: skip
                assert getattr(found, field) == getattr(was, field), (was.key, field)
        for length in LENGTHS:
            assert generation_of(key_of(length), client.get(key_of(length), verify=True)) == length
        assert client.get("short") is None, "what expired meanwhile is not served"
        assert client.exists_many(keys) == [True] * len(keys)
        now = client.stats()
        assert now.protected_bytes == stats.protected_bytes == 2 * MIB
        assert (now.incarnation, now.pool_id, now.bad_records) == (2, stats.pool_id, 0)
        info = next(info for info in client.spaces() if info.digest == space.digest)
        assert (info.live_objects, info.live_bytes) == (3, 300_000)
        assert client.purge(model="m") == 3
        assert client.remove("hard") is Status.PINNED
        assert client.put(key_of(256), b"another") is Status.EXISTS
        assert client.put_many([b"n" * 200, b"o" * 100], [b"1", b"2"], metadata=b"new").all_ok, "long keys go on"
        assert generation_of(key_of(255), client.get(key_of(255))) == 255


def test_what_was_cold_before_goes_first_after(node: RunningNode) -> None:
    keys = [f"key {i}" for i in range(32)]
    with node.connect() as client:
        for key in keys:
            client.put(key, value_of(key, 1, MIB))
        client.touch_many(keys[4:8])
        client.get("key 0")
    node.restart()
    with node.connect() as client:
        assert client.stats().free_bytes == 0
        for i in range(8):
            assert client.put(f"new {i}", value_of("new", i, MIB)) is Status.OK
        gone = {key for key, there in zip(keys, client.exists_many(keys), strict=True) if not there}
        assert len(gone) == 8
        assert not gone & {"key 0", *keys[4:8]}, "what was used lately is there"
        assert gone <= set(keys[:20]), "and the newest is"


def test_a_purge_holds_over_a_restart_also_for_what_it_had_not_freed_yet(node: RunningNode) -> None:
    space = a_space("purged")
    keys = space.keys([i.to_bytes(32, "little") for i in range(3000)])
    with node.connect() as client:
        client.declare(space)
        client.put_many(keys, [b"value"] * len(keys))
        client.put("other", b"value")
        assert client.purge(space=space) == 3000
        node.kill()
    node.start()
    with node.connect() as client:
        assert client.stats().objects == 1
        assert not any(client.exists_many(keys))
        assert client.put(keys[0], b"new") is Status.OK
        assert client.get("other") == b"value"


def test_many_restarts_in_a_row_lose_and_leak_nothing() -> None:
    with running_node("16MiB", prefault=False) as node:
        with node.connect() as client:
            client.put_many([f"key {i}" for i in range(200)], [value_of(f"key {i}", 1, 70_000) for i in range(200)])
        for round_ in range(4):
            node.restart(kill=round_ % 2 == 0)
        with node.connect() as client:
            stats = client.stats()
            assert (stats.incarnation, stats.objects, stats.bad_records, stats.recovered) == (5, 200, 0, 200)
            client.clear()
            eventually(lambda: client.stats().live_bytes == 0)
            with client.reserve("all", client.pool_bytes, wait_s=2) as (extent,):
                assert extent.status is Status.OK


def test_ids_of_an_earlier_incarnation_that_were_not_declared_are_stale(node: RunningNode) -> None:
    with node.connect() as client:
        client.put("key", b"value")
    with Raw(node.folder) as raw:
        reserved = raw.ask(m.Reserve(2, [b"new"], [5000]))
        assert isinstance(reserved, m.Reserved)
        pool_id, session, token = raw.welcome.pool_id, raw.welcome.session, raw.welcome.token
        node.restart()
        with Raw(node.folder) as again:
            answer = again.ask(m.Commit(2, reserved.ids))
            assert isinstance(answer, m.StatusReply)
            assert answer.statuses == [Status.STALE]
        with Raw(node.folder, hello=False) as again:
            welcome = again.ask(m.Hello(1, 1, 0, [], "", "raw", False, session, token, pool_id, [], []))
            assert isinstance(welcome, m.Welcome)
            assert welcome.resumed
            answer = again.ask(m.Commit(2, reserved.ids))
            assert isinstance(answer, m.StatusReply)
            assert answer.statuses == [Status.STALE], "it came back without declaring it"
    assert node.stats().reservations == 0
    with node.connect() as client:
        assert client.get("new") is None


def test_the_mode_at_the_start_is_the_option(node: RunningNode) -> None:
    with node.connect() as client:
        client.set_mode("off")
        assert client.put("key", b"value") is moonpool.Status.DISABLED
    node.options["mode"] = "read"
    node.restart()
    with node.connect() as client:
        assert client.mode() == "read"
