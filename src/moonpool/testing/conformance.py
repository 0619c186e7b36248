"""What every client keeps to, whatever it talks to: a pytest class that a new kind passes by subclassing.

    class TestMine(ClientConformance):
        @pytest.fixture
        def client(self): ...      # a `moonpool.Client` of an empty pool of 16 to 64 MiB that nobody else uses

Register it for assertion rewriting: `pytest.register_assert_rewrite("moonpool.testing.conformance")`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import Group, Status
from moonpool.testing.conformance_node import NodeConformance
from moonpool.testing.node import eventually
from moonpool.testing.values import generation_of, value_of

MIB = 1 << 20
SIZES = (16, 4095, 4096, 4097, 65_536, 65_537, MIB, 9 * MIB + 5)
"""Around a granule, around what goes with the message, and large enough to be copied by several threads."""


class ClientConformance(NodeConformance):
    """The promises of `moonpool.Client`, each as a test over the fixture `client`."""

    @pytest.fixture
    def client(self) -> Iterator[moonpool.Client]:
        raise NotImplementedError("a subclass gives the fixture `client`")

    # ---- put and get ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_put_comes_back_by_every_way_of_getting_it(self, client: moonpool.Client, size: int) -> None:
        value = value_of("key", 1, size)
        assert client.put("key", value) is Status.OK
        target = bytearray(size + 3)
        assert client.get_into("key", target) == size
        assert generation_of("key", target[:size]) == 1
        assert target[size:] == b"\0\0\0", "nothing is written behind the object"
        got = client.get("key")
        assert got is not None
        assert generation_of("key", got) == 1
        with client.view("key") as views:
            assert views[0] is not None
            assert generation_of("key", views[0]) == 1

    def test_any_contiguous_buffer_is_a_value_and_any_writable_one_a_target(self, client: moonpool.Client) -> None:
        plain = value_of("x", 1, 96_000)
        values: list[Any] = [
            plain.tobytes(),
            bytearray(plain),
            plain.data,
            plain.view(np.float32).reshape(10, -1, 8),
            plain.view(np.float16).reshape(4, -1),
        ]
        keys = [f"value {i}" for i in range(len(values))]
        assert client.put_many(keys, values).all_ok
        targets: list[Any] = [
            bytearray(96_000),
            np.empty(96_000, np.uint8),
            memoryview(bytearray(96_000)),
            np.empty((100, 240), np.float32),
            np.empty((2, 24_000), np.int16),
        ]
        statuses = client.get_many_into(keys, targets)
        assert statuses.all_ok
        assert statuses.sizes == [96_000] * len(keys)
        for target in targets:
            assert bytes(memoryview(target).cast("B")) == plain.tobytes()

    def test_keys_are_text_or_bytes_of_up_to_256_bytes(self, client: moonpool.Client) -> None:
        for length in (1, 47, 48, 49, 64, 65, 255, 256):
            key = bytes(range(256))[:length]
            assert client.put(key, value_of(key, length, 64)) is Status.OK
        for length in (1, 47, 48, 49, 64, 65, 255, 256):
            key = bytes(range(256))[:length]
            assert client.exists(key)
            assert generation_of(key, client.get(key)) == length
        client.put("grün", b"text")
        assert client.get("grün".encode()) == b"text"

    def test_a_put_of_a_stored_key_changes_nothing(self, client: moonpool.Client) -> None:
        for size in (100, 100_000):
            client.put(f"key {size}", value_of("key", 1, size))
            assert client.put(f"key {size}", value_of("key", 2, size)) is Status.EXISTS
            assert generation_of("key", client.get(f"key {size}")) == 1

    def test_a_miss_is_a_value(self, client: moonpool.Client) -> None:
        target = bytearray(b"untouched")
        assert client.get("no") is None
        assert client.get_into("no", target) is None
        assert client.get_many_into(["no"], [target]) == [Status.MISS]
        assert target == b"untouched"
        with client.view_many(["no", "none"]) as views:
            assert list(views) == [None, None]
        assert client.exists_many(["no"]) == [False]
        assert client.stat("no") is None
        assert client.remove_many(["no"]) == [Status.MISS]
        assert client.touch("no") is Status.MISS
        assert client.pin_many(["no"]) == [Status.MISS]
        assert client.prefix_length(["no"]) == 0

    # ---- bad input -----------------------------------------------------------------------------------------------

    def test_in_a_batch_each_bad_key_has_its_own_status_and_the_others_are_stored(
        self, client: moonpool.Client
    ) -> None:
        for size in (32, 70_000):
            client.clear()
            good = value_of("good", 1, size)
            keys: list[str | bytes] = ["a", "a", "", "empty", b"k" * 257, "b", "odd", "metadata"]
            values: list[Any] = [good, good, good, b"", good, good, np.zeros((8, 8))[:, ::2], good]
            metadata = [b""] * 7 + [b"m" * 1025]
            statuses = client.put_many(keys, values, metadata=metadata)
            assert statuses == [
                Status.OK, Status.DUPLICATE, Status.EMPTY, Status.EMPTY, Status.KEY_TOO_LONG, Status.OK,
                Status.INVALID, Status.KEY_TOO_LONG,
            ]  # fmt: skip
            assert statuses.details.keys() == {1, 2, 3, 4, 6, 7}
            assert "256" in statuses.details[4], "the limit is named"
            assert "1024" in statuses.details[7]
            assert client.exists_many(["a", "b"]) == [True, True]

    def test_a_single_call_raises_for_what_a_batch_reports(self, client: moonpool.Client) -> None:
        client.put("here", b"value")
        with pytest.raises(moonpool.InvalidRequest, match="at least 1 byte"):
            client.put("key", b"")
        with pytest.raises(moonpool.InvalidRequest, match="256"):
            client.put("k" * 257, b"value")
        with pytest.raises(moonpool.InvalidRequest, match="256"):
            client.get("k" * 257)
        with pytest.raises(moonpool.InvalidRequest):
            client.put("key", 5)
        with pytest.raises(moonpool.InvalidRequest, match="read-only"):
            client.get_into("here", b"12345")
        with pytest.raises(moonpool.InvalidRequest, match="one value a key"):
            client.put_many(["a", "b"], [b"1"])
        with pytest.raises(moonpool.InvalidRequest):
            client.purge()
        for options in ({"pin": "hot"}, {"pin": "soft"}, {"ttl_s": -1}, {"wait_s": float("nan")}, {"priority": 256}):
            with pytest.raises(moonpool.InvalidRequest):
                client.put("key", b"value", **options)
        with pytest.raises(moonpool.InvalidRequest, match="checksum"):
            client.put("key", b"value", checksum=-1)
        assert not client.exists("key")

    def test_a_target_that_is_too_small_stays_as_it_was(self, client: moonpool.Client) -> None:
        client.put("key", value_of("key", 1, 100_000))
        targets = [bytearray(99_999), bytearray(100_000)]
        statuses = client.get_many_into(["key", "key"], targets)
        assert statuses == [Status.BUFFER_TOO_SMALL, Status.OK]
        assert "99999" in statuses.details[0]
        assert not any(targets[0])
        with pytest.raises(moonpool.InvalidRequest, match="100000"):
            client.get_into("key", bytearray(5))

    def test_an_object_larger_than_the_pool_names_the_limit(self, client: moonpool.Client) -> None:
        size = client.pool_bytes + 1
        with client.reserve("large", size) as (extent,):
            assert extent.status is Status.TOO_LARGE
            assert str(client.pool_bytes) in extent.detail
            assert extent.buffer is None
        with client.reserve("none", 0) as (extent,):
            assert extent.status is Status.EMPTY

    # ---- reserve -------------------------------------------------------------------------------------------------

    def test_a_reservation_is_invisible_until_its_context_ends(self, client: moonpool.Client) -> None:
        with client.reserve_many(["a", "b"], [5000, 70_000]) as extents:
            for extent in extents:
                assert extent.buffer is not None
                extent.buffer[:] = value_of(extent.key, 1, len(extent.buffer))
            assert client.exists_many(["a", "b"]) == [False, False]
            assert client.get("a") is None
            assert client.put("a", b"another's") is Status.IN_PROGRESS
            assert client.list(b"") is not None
            assert list(client.list()) == []
        assert extents.statuses.all_ok
        assert extents[0].buffer is None, "not the caller's any more"
        assert [generation_of(key, client.get(key)) for key in "ab"] == [1, 1]

    def test_an_exception_aborts_all_and_abort_aborts_one(self, client: moonpool.Client) -> None:
        with pytest.raises(ZeroDivisionError), client.reserve_many(["a", "b"], [4096, 4096]):
            raise ZeroDivisionError
        assert client.exists_many(["a", "b"]) == [False, False]
        with client.reserve_many(["a", "b"], [4096, 4096]) as extents:
            extents[0].abort()
            assert client.put("a", b"now free") is Status.OK
        assert client.get("a") == b"now free"
        assert client.exists("b")
        assert client.stats().reservations == 0

    def test_a_batch_of_reservations_has_a_status_a_key(self, client: moonpool.Client) -> None:
        client.put("there", b"value")
        with client.reserve_many(["there", "new", "new", "k" * 300], [10, 10, 10, 10]) as extents:
            assert [extent.status for extent in extents] == [
                Status.EXISTS, Status.OK, Status.DUPLICATE, Status.KEY_TOO_LONG,
            ]  # fmt: skip

    def test_waiting_for_another_writer_ends_with_its_commit_or_its_giving_up(self, client: moonpool.Client) -> None:
        for gives_up in (False, True):
            first = client.reserve("key", 4096)
            timer = threading.Timer(0.1, first.abort if gives_up else first.commit)
            timer.start()
            with client.reserve("key", 4096, wait_for_others=True, wait_s=5) as (extent,):
                assert extent.status is (Status.OK if gives_up else Status.EXISTS)
            timer.join()
            client.remove("key")

    def test_when_all_is_held_a_reservation_says_after_its_wait_what_there_is(self, client: moonpool.Client) -> None:
        half = client.pool_bytes // 2
        with client.reserve_many(["a", "b"], [half, half - MIB]) as held:
            assert [extent.status for extent in held] == [Status.OK, Status.OK]
            begun = time.monotonic()
            with client.reserve_many(["c", "d", "e"], [half] * 3, wait_s=0.3) as extents:
                assert [extent.status for extent in extents] == [Status.NO_SPACE] * 3
                assert str(MIB) in extents[0].detail, "the largest run is named"
            waited = time.monotonic() - begun
            assert 0.25 < waited < 3, "the wait is the batch's, not each key's"
            with client.reserve("small", MIB, wait_s=0) as (extent,):
                assert extent.status is Status.OK

    def test_a_reservation_that_waits_goes_on_when_space_is_given_back(self, client: moonpool.Client) -> None:
        held = client.reserve("all", client.pool_bytes)
        timer = threading.Timer(0.1, held.abort)
        timer.start()
        with client.reserve("next", client.pool_bytes, wait_s=5) as (extent,):
            assert extent.status is Status.OK
        timer.join()

    def test_a_batch_larger_than_the_pool_leaves_the_pool_sound(self, client: moonpool.Client) -> None:
        # The first of the batch are evicted for the last, in the same step as it may be.
        count = client.pool_bytes // 60_000 + 200
        for round_ in range(3):
            keys = [f"{round_} {i}" for i in range(count)]
            statuses = client.put_many(keys, [value_of(key, 1, 60_000) for key in keys], wait_s=5)
            assert statuses.all_ok, statuses.details
            for key in keys:
                got = client.get(key)
                assert got is None or generation_of(key, got) == 1
            assert client.get(keys[-1]) is not None
        client.clear()
        with client.reserve("all", client.pool_bytes, wait_s=5) as (extent,):
            assert extent.status is Status.OK, "all memory is usable again as one run"

    # ---- views ---------------------------------------------------------------------------------------------------

    def test_a_view_is_read_only_and_of_the_right_size(self, client: moonpool.Client) -> None:
        client.put("key", b"0123456789")
        with client.view_many(["key", "no"]) as views:
            array = views[0]
            assert array is not None
            assert views.statuses == [Status.OK, Status.MISS]
            assert array.tobytes() == b"0123456789"
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError):
                array.flags.writeable = True

    def test_what_derives_from_a_view_keeps_its_bytes_whatever_happens(self, client: moonpool.Client) -> None:
        size = client.pool_bytes // 4
        client.put("key", value_of("key", 1, size))
        expected = value_of("key", 1, size)
        with client.view("key") as views:
            array = views[0]
            assert array is not None
            derived: list[Any] = [
                array[4096:],
                np.frombuffer(array, np.uint16)[2048:],
                array.data[4096:],
                array[: size // 8 * 8].view(np.float64).reshape(-1, 2)[256:],
                np.asarray(array[4096:][:]),
            ]
            del array
        assert client.remove("key") is Status.OK
        for kept in range(len(derived), 0, -1):
            for generation in range(2, 4):
                # Everything else in the pool is written over, as far as the pool lets us.
                client.clear()
                keys = [f"other {i}" for i in range(16)]
                client.put_many(keys, [value_of(key, generation, client.pool_bytes // 16) for key in keys], wait_s=0)
            for one in derived:
                found = np.frombuffer(memoryview(one).cast("B"), np.uint8)
                assert np.array_equal(found, expected[4096 : 4096 + len(found)])
                del found
            assert client.stats().pins == 1, f"{kept} derived arrays hold it"
            del derived[-1], one
        client.get("flush")
        assert client.stats().pins == 0, "the last one gone, the pin is gone"
        client.clear()
        with client.reserve("all", client.pool_bytes, wait_s=1) as (extent,):
            assert extent.status is Status.OK

    def test_views_outlive_the_client(self, client: moonpool.Client) -> None:
        client.put("key", value_of("key", 1, 100_000))
        views = client.view("key")
        array = views[0]
        client.close()
        views.close()
        assert generation_of("key", array) == 1
        with pytest.raises(moonpool.Closed):
            client.get("key")

    # ---- objects -------------------------------------------------------------------------------------------------

    def test_removed_is_gone_at_once_and_its_memory_free(self, client: moonpool.Client) -> None:
        client.put_many(["a", "b"], [bytes(100_000), bytes(200_000)])
        before = client.stats().live_bytes
        assert client.remove_many(["a", "no"]) == [Status.OK, Status.MISS]
        assert client.exists_many(["a", "b"]) == [False, True]
        assert client.stats().live_bytes == before - 102_400
        assert client.put("a", b"again") is Status.OK
        assert client.clear() == 2
        assert list(client.list()) == []
        eventually(lambda: client.stats().live_bytes == 0, "the memory is free again")

    def test_a_hard_pinned_object_is_removed_only_by_force(self, client: moonpool.Client) -> None:
        client.put("key", b"value", pin="hard")
        assert client.remove("key") is Status.PINNED
        assert client.get("key") == b"value"
        assert client.remove("key", force=True) is Status.OK
        assert client.stats().protected_bytes == 0
        client.put("other", b"value", pin="hard")
        client.unpin_many(["other"])
        assert client.remove("other") is Status.OK

    def test_hard_pins_survive_pressure_and_soft_ones_outlast_the_rest(self, client: moonpool.Client) -> None:
        eighth = client.pool_bytes // 8
        client.put("hard", value_of("hard", 1, eighth), pin="hard")
        client.put("soft", value_of("soft", 1, eighth), pin="soft", pin_ttl_s=60)
        client.put("plain", value_of("plain", 1, eighth))
        for i in range(20):
            assert client.put(f"other {i}", value_of("other", i, eighth)) is Status.OK
        assert client.exists_many(["hard", "soft", "plain"]) == [True, True, False]
        with client.reserve("most", 7 * eighth, wait_s=1) as (extent,):
            assert extent.status is Status.OK, "a soft pin gives way where nothing else suffices"
        assert client.exists_many(["hard", "soft"]) == [True, False]

    def test_pins_are_limited_to_their_share_however_they_come(self, client: moonpool.Client) -> None:
        eighth = client.pool_bytes // 8
        keys = [f"key {i}" for i in range(8)]
        # In one batch, before any of it is committed.
        with client.reserve_many(keys, [eighth] * 8, pin="hard", wait_s=0) as extents:
            assert [extent.status for extent in extents] == [Status.OK] * 4 + [Status.TOO_LARGE] * 4
            assert "pin_share" in extents[4].detail
        assert client.stats().protected_bytes == 4 * eighth
        assert client.put("plain", value_of("plain", 1, eighth)) is Status.OK
        assert client.pin_many(["plain"]) == [Status.TOO_LARGE]
        assert client.pin_many(keys[:4], ttl_s=60).all_ok, "what is pinned already counts once"
        client.unpin_many(keys[:1])
        assert client.pin_many(["plain"]) == [Status.OK]
        with pytest.raises(ZeroDivisionError), client.reserve("aborted", MIB, pin="hard"):
            raise ZeroDivisionError
        client.clear()
        eventually(lambda: client.stats().protected_bytes == 0, "no pin counts any more")

    def test_an_expired_object_is_never_served(self, client: moonpool.Client) -> None:
        client.put("short", b"value", ttl_s=0.05)
        client.put("long", b"value", ttl_s=600)
        stat = client.stat("long")
        assert stat is not None
        assert 590 < stat.expiry - time.time() < 610
        time.sleep(0.06)
        assert client.get("short") is None
        assert client.stat("short") is None
        assert client.put("short", b"new") is Status.OK
        assert client.get("long") == b"value"

    def test_stat_tells_what_the_writer_gave(self, client: moonpool.Client) -> None:
        client.put("key", b"x" * 5000, metadata=b"\x00opaque\xff", priority=7, pin="soft", pin_ttl_s=60)
        stat = client.stat("key")
        assert stat is not None
        assert (stat.key, stat.size, stat.metadata, stat.priority, stat.pin) == (
            b"key", 5000, b"\x00opaque\xff", 7, 1,
        )  # fmt: skip
        assert abs(stat.created - time.time()) < 60
        assert client.pin_many(["key"]).all_ok
        changed = client.stat("key")
        assert changed is not None
        assert changed.pin == 2

    def test_list_gives_every_object_of_a_prefix_once(self, client: moonpool.Client) -> None:
        keys = [f"{'ab'[i % 2]}{i:05}" for i in range(3000)]
        assert client.put_many(keys, [b"v"] * 3000).all_ok
        assert sorted(stat.key.decode() for stat in client.list("a")) == keys[::2]
        assert len(list(client.list())) == 3000

    def test_of_what_is_full_the_coldest_goes(self, client: moonpool.Client) -> None:
        eighth = client.pool_bytes // 8
        keys = [f"key {i}" for i in range(8)]
        client.put_many(keys, [value_of(key, 1, eighth) for key in keys])
        assert client.touch("key 0") is Status.OK
        assert client.put("new", value_of("new", 1, eighth)) is Status.OK
        # Of a chain the tail goes first, as the head is of use without it.
        assert client.exists_many([*keys, "new"]) == [True] * 7 + [False, True]

    # ---- lookups -------------------------------------------------------------------------------------------------

    def test_match_finds_the_longest_prefix_by_each_rule(self, client: moonpool.Client) -> None:
        keys = [f"block {i}" for i in range(10)]
        client.put_many([key for i, key in enumerate(keys) if i != 6], [b"v"] * 9)
        assert client.prefix_length(keys) == 6
        assert client.match([Group(keys)]).length == 6
        assert client.match([Group(keys, "window", window=2)]).length == 10
        assert client.match([Group(keys, "exact"), Group(keys, "window", window=3)]).length == 10
        assert client.match([Group(keys), Group(keys[:2], "exact", step=4)]).length == 4
        assert client.match([Group(["absent"])]).length == 0
        assert client.match([]).length == 0

    def test_a_hold_keeps_what_was_found_until_it_is_released(self, client: moonpool.Client) -> None:
        eighth = client.pool_bytes // 8
        keys = [f"block {i}" for i in range(3)]
        client.put_many(keys, [value_of(key, 1, eighth) for key in keys])
        found = client.match([Group(keys)], hold="request 1")
        assert (found.length, found.hold) == (3, "request 1")
        assert client.match([Group(keys)], hold="request 1") == found, "asked again: the same answer"
        assert client.stats().holds == 1
        for i in range(10):
            client.put(f"other {i}", value_of("other", i, eighth))
        with client.adopt("request 1") as views:
            assert [generation_of(key, array) for key, array in zip(keys, views, strict=True)] == [1, 1, 1]
        assert client.release_hold("request 1")
        assert not client.release_hold("request 1"), "a second release finds none"
        assert len(client.adopt("request 1")) == 0
        assert client.match([Group(["absent"])], hold="request 2").hold is None
        assert client.stats().holds == 0

    def test_a_hold_tells_where_its_objects_lie(self, client: moonpool.Client) -> None:
        keys = [f"part {i}" for i in range(700)]
        values = [bytes([i & 0xFF, i >> 8]) * 40 for i in range(700)]
        assert client.put_many(keys, values).all_ok
        window = Group(keys, "window", window=3)
        found = client.match([Group(keys), window], hold="load 1", extents=True)
        where = found.extents
        assert where is not None
        assert (found.length, len(where.offsets)) == (700, 703)
        pool = client.link.attachment.pool.bytes
        lying = [pool[o : o + s].tobytes() for o, s in zip(where.offsets, where.sizes, strict=True)]
        assert lying == values + values[-3:], "in the order of the groups' needed keys"
        assert client.match([Group(keys), window], hold="load 1", extents=True) == found, "asked again: the same"
        assert client.still_good(where)
        client.remove_many(keys, force=True)
        assert not client.still_good(where), "removed meanwhile: what was read is a miss"
        client.drop_hold("load 1")
        assert client.stats().holds == 0

    def test_a_hold_tells_the_checksums_that_are_known(self, client: moonpool.Client) -> None:
        assert client.put("given", b"value", checksum=7) is Status.OK
        found = client.match([Group(["given"])], hold="verified", extents=True)
        assert found.extents is not None
        assert found.extents.checksums == [7]
        client.release_hold("verified")

    def test_a_hold_may_be_asked_for_without_waiting(self, client: moonpool.Client) -> None:
        client.put_many(["a", "b"], [b"1", b"2"])
        absent = client.begin_match([Group(["absent"])], "request 3")
        assert absent == moonpool.Match(0), "shared memory has the answer"
        pending = client.begin_match([Group(["a", "b"])], "request 3", extents=True)
        assert not isinstance(pending, moonpool.Match)
        assert pending.wait(10.0)
        assert pending.result().length == 2
        client.release_hold("request 3")
        given_up = client.begin_match([Group(["a", "b"])], "request 4")
        assert not isinstance(given_up, moonpool.Match)
        given_up.cancel()
        assert client.stats().holds == 0, "given up before the answer came: the hold is gone all the same"
