"""The part of the conformance suite about the node as a whole: key spaces, purges, the mode, checksums, the feed,
threads. `conformance.ClientConformance` includes it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import xxhash

import moonpool
from moonpool import Status
from moonpool.keys import KeySpace
from moonpool.testing.node import eventually
from moonpool.testing.values import generation_of, value_of

MIB = 1 << 20
SIZES = (16, 4095, 4096, 4097, 65_536, 65_537, MIB, 9 * MIB + 5)
"""Around a granule, around what goes with the message, and large enough to be copied by several threads."""


class NodeConformance:
    """What every client sees of its node. A subclass gives it a `client` fixture, see `ClientConformance`."""

    # ---- key spaces, purge, mode ---------------------------------------------------------------------------------

    def test_a_key_space_counts_what_is_in_it_and_refuses_another_description(self, client: moonpool.Client) -> None:
        space = a_space("counted")
        digest = client.declare(space)
        assert digest == client.declare(space) == space.digest
        keys = space.keys([bytes([i]) * 32 for i in range(3)])
        client.put_many(keys, [bytes(1000)] * 3)
        info = next(info for info in client.spaces() if info.digest == digest)
        assert (info.live_objects, info.live_bytes) == (3, 3000)
        assert info.description == space.canonical

    def test_purge_takes_what_it_names_and_nothing_else(self, client: moonpool.Client) -> None:
        first, second = a_space("first", model="m"), a_space("second", model="m")
        for space in (first, second):
            client.declare(space)
            client.put_many(space.keys([b"1" * 32, b"2" * 32]), [b"value"] * 2)
        client.put("undeclared", b"value")
        assert client.purge(tenant="first") == 2
        assert client.exists_many(first.keys([b"1" * 32])) == [False]
        assert client.exists_many(second.keys([b"1" * 32])) == [True]
        assert client.put(first.key(b"1" * 32), b"new") is Status.OK
        assert client.purge(model="m") == 3
        assert client.purge(older_than_s=3600) == 0
        time.sleep(0.02)
        assert client.purge(older_than_s=0.01) == 1
        eventually(lambda: client.stats().objects == 0 == client.stats().live_bytes, "the memory is free again")

    def test_a_reservation_that_began_before_a_purge_is_refused(self, client: moonpool.Client) -> None:
        space = a_space("purged")
        client.declare(space)
        key = space.key(b"1" * 32)
        for purge in list[dict[str, Any]]([{"space": space}, {"older_than_s": 0.01}]):
            extents = client.reserve(key, 4096)
            time.sleep(0.02)
            client.purge(**purge)
            assert extents.commit() == [Status.STALE]
            assert not client.exists(key)
            eventually(lambda: client.stats().live_bytes == 0, "the memory is free again")
        assert client.put(key, b"begun after") is Status.OK

    def test_the_mode_switches_reading_and_writing_off(self, client: moonpool.Client) -> None:
        client.put("key", b"value")
        client.set_mode("read")
        assert client.put_many(["new", "large"], [b"v", bytes(100_000)]) == [Status.DISABLED] * 2
        assert client.get("key") == b"value"
        client.set_mode("write")
        assert client.put("new", b"value") is Status.OK
        assert not client.exists("key")
        assert client.get("key") is None
        assert client.get_many_into(["key"], [bytearray(9)]) == [Status.DISABLED]
        assert client.prefix_length(["key"]) == 0
        client.set_mode("off")
        assert client.put("other", b"value") is Status.DISABLED
        assert client.mode() == "off"
        client.set_mode("on")
        assert client.get("key") == b"value"

    # ---- checksums -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [1000, 200_000])
    def test_verify_finds_bytes_that_differ_from_their_checksum(self, client: moonpool.Client, size: int) -> None:
        value = value_of("key", 1, size)
        right = xxhash.xxh3_64_intdigest(value.data)
        client.put_many(["good", "none", "bad"], [value] * 3, checksums=[right, 0, right ^ 1])
        assert client.get("good", verify=True) == value.tobytes()
        assert client.get("none", verify=True) == value.tobytes(), "the node computes what the writer didn't give"
        statuses = client.get_many_into(["good", "none", "bad"], [bytearray(size) for _ in range(3)], verify=True)
        assert statuses == [Status.OK, Status.OK, Status.CORRUPT]
        assert not client.exists("bad"), "the node looked itself, and dropped it"
        client.put("bad", value, checksum=right ^ 1)
        with pytest.raises(moonpool.IntegrityError):
            client.get("bad", verify=True)
        client.put("bad", value, checksum=right ^ 1)
        with client.view_many(["bad", "good"], verify=True) as views:
            assert views.statuses == [Status.CORRUPT, Status.OK]
            assert views[0] is None
        assert client.verify_many(["good", "no"]) == [Status.OK, Status.MISS]

    # ---- feed ----------------------------------------------------------------------------------------------------

    def test_the_feed_tells_every_change_in_order_and_why(self, client: moonpool.Client) -> None:
        client.put("before", b"value", metadata=b"of before")
        with client.subscribe(snapshot=True) as feed:
            events = [next(feed), next(feed)]
            client.put("new", b"value", metadata=b"of new")
            client.remove("before")
            client.put("expiring", b"v", ttl_s=0.01)
            time.sleep(0.02)
            client.get("expiring")
            client.clear()
            events += iter(lambda: feed.poll(0.5), None)
        told = [(event.kind, event.key, event.reason) for event in events]
        assert told[:2] == [("snapshot", b"before", ""), ("snapshot-end", b"", "")]
        assert events[0].metadata == b"of before"
        changes = told[2:]
        for change in (("stored", b"new", ""), ("removed", b"before", "removed"), ("removed", b"expiring", "expired")):
            assert change in changes
        assert changes.index(("stored", b"new", "")) < changes.index(("removed", b"before", "removed"))
        assert ("removed", b"new", "purged") in changes
        assert ("cleared", b"", "") in changes
        sequences = [event.sequence for event in events[2:]]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences))), "no number is left out"

    # ---- threads -------------------------------------------------------------------------------------------------

    def test_eight_threads_of_mixed_calls_never_see_a_wrong_byte(self, client: moonpool.Client) -> None:
        failures: list[BaseException] = []
        sizes = [100, 5000, 70_000, client.pool_bytes // 64]

        def work(number: int) -> None:
            random = np.random.default_rng(number)
            target = bytearray(max(sizes))
            try:
                for step in range(60):
                    keys = [f"key {i}" for i in random.integers(0, 24, 3)]
                    size = sizes[step % 4]
                    match random.integers(0, 6):
                        case 0 | 1:
                            client.put_many(keys, [value_of(key, number << 16 | step, size) for key in keys], wait_s=0)
                        case 2:
                            statuses = client.get_many_into(keys[:1], [target])
                            if statuses[0] is Status.OK:
                                generation_of(keys[0], memoryview(target)[: statuses.sizes[0]])
                        case 3:
                            with client.view_many(keys) as views:
                                for key, array in zip(keys, views, strict=True):
                                    assert array is None or generation_of(key, array) >= 0
                                array = None
                        case 4:
                            client.remove_many(keys[:1])
                        case _:
                            with client.reserve(keys[0], size, wait_s=0) as (extent,):
                                if extent.buffer is not None:
                                    extent.buffer[:] = value_of(keys[0], number << 16 | step, size)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        client.get("flush")
        stats = client.stats()
        assert (stats.pins, stats.reservations, stats.reservations_waiting) == (0, 0, 0)


def a_space(tenant: str, **fields: Any) -> KeySpace:
    """A key space of this tenant's, for tests."""
    return KeySpace(
        weights="test:" + "0" * 64, tokens_per_block=16, kv_dtype="bfloat16", layout="layer,kv,token,head,dim",
        tenant=tenant, **fields,
    )  # fmt: skip
