"""Checksums: computed in the background, compared by the scrub, asked for by `verify`."""

from __future__ import annotations

import xxhash

import moonpool
from moonpool import Status
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.records import extents
from moonpool.testing.values import value_of


def flip(node: RunningNode, key: str, at: int = 1000) -> None:
    """Flip one bit of an object's bytes in the pool file, as a bad memory cell would."""
    extent = next(extent for extent in extents(node.folder) if extent.key == key.encode())
    with (node.folder / "pool").open("r+b") as file:
        file.seek(extent.offset + at)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def test_every_object_gets_its_checksum_in_the_background(client: moonpool.Client) -> None:
    keys = [f"key {i}" for i in range(40)]
    values = [value_of(key, 1, 10_000 + i) for i, key in enumerate(keys)]
    client.put_many(keys, values)
    eventually(lambda: all(stat is not None and stat.has_checksum for stat in client.stat_many(keys)))
    for stat, value in zip(client.stat_many(keys), values, strict=True):
        assert stat is not None
        assert stat.checksum == xxhash.xxh3_64_intdigest(value.data)


def test_the_scrub_finds_a_flipped_bit_and_drops_that_object_alone() -> None:
    with running_node("32MiB", scrub_interval="1s", checksum_share="100%") as node, node.connect() as client:
        keys = [f"key {i}" for i in range(20)]
        client.put_many(keys, [value_of(key, 1, 300_000) for key in keys])
        eventually(lambda: all(stat is not None and stat.has_checksum for stat in client.stat_many(keys)))
        with client.subscribe() as feed:
            flip(node, "key 7")
            eventually(lambda: client.stats().corrupt_objects == 1, within_s=20)
            event = feed.poll(5)
            assert event is not None
            assert (event.kind, event.key, event.reason) == ("removed", b"key 7", "corrupt")
        assert client.get("key 7") is None
        assert client.exists_many(keys) == [key != "key 7" for key in keys]
        scrubbed = client.stats().scrubbed_bytes
        eventually(lambda: client.stats().scrubbed_bytes > scrubbed + 19 * 300_000, "it goes round", within_s=20)
        assert client.stats().corrupt_objects == 1


def test_without_a_scrub_verify_finds_it(node: RunningNode) -> None:
    node.options["scrub_interval"] = "0"
    node.restart()
    with node.connect() as client:
        client.put_many(["a", "b"], [value_of(key, 1, 300_000) for key in "ab"])
        eventually(lambda: all(stat is not None and stat.has_checksum for stat in client.stat_many(["a", "b"])))
        flip(node, "a", 299_999)
        assert client.get("a") is not None, "who doesn't ask isn't told"
        assert client.verify_many(["b"]) == [Status.OK]
        statuses = client.get_many_into(["a", "b"], [bytearray(300_000), bytearray(300_000)], verify=True)
        assert statuses == [Status.CORRUPT, Status.OK]
        assert client.get("a") is None, "the node looked for itself, and dropped it"


def test_a_corrupt_object_under_a_view_is_not_reused(node: RunningNode) -> None:
    with node.connect() as client:
        client.put("a", value_of("a", 1, 300_000))
        assert client.verify_many(["a"]) == [Status.OK]
        with client.view("a"):
            flip(node, "a")
            assert client.verify_many(["a"]) == [Status.CORRUPT]
            assert client.stats().doomed == 1
            assert client.put("a", value_of("a", 2, 300_000)) is Status.OK
        assert client.stats().doomed == 0
