"""Client and node of two releases: one minor version apart works each way, further apart there is one clear line."""

from __future__ import annotations

import time

import msgspec
import pytest

import moonpool
from moonpool.testing.node import RunningNode, running_node
from moonpool.wire import messages as m
from moonpool.wire.frames import decode_reply
from tests.faults.processes import ended, python
from tests.faults.raw import Raw

USE = """
import sys, moonpool
with moonpool.connect(sys.argv[1]) as client:
    assert client.put_many(["small", "large"], [b"v", bytes(100_000)]).all_ok
    assert client.get("small") == b"v"
    assert client.get_into("large", bytearray(100_000)) == 100_000
    with client.reserve("filled", 5000) as (extent,):
        extent.buffer[:] = 1
    found = client.match([moonpool.Group(["small", "large"])], hold="hold")
    assert found.length == 2 and len(client.adopt("hold")) == 2 and client.release_hold("hold")
    assert client.stats().objects == 3
    assert client.clear() == 3
print("worked")
"""


def use(node: RunningNode, protocol: str) -> tuple[int, str, str]:
    with ended(python(USE, node.url, test=f"protocol={protocol}" if protocol else "")) as process:
        output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors


@pytest.mark.parametrize(("ours", "theirs"), [("1.0", "1.1"), ("1.1", "1.0"), ("1.1", "1.2"), ("1.2", "1.1")])
def test_one_minor_version_apart_works(ours: str, theirs: str) -> None:
    with running_node("16MiB", start=False, environment={"MOONPOOL_TEST": f"protocol={theirs}"}) as node:
        started(node)
        assert use(node, ours) == (0, "worked\n", "")


@pytest.mark.parametrize(("ours", "theirs"), [("1.0", "1.2"), ("1.2", "1.0"), ("2.0", "1.0"), ("1.0", "2.0")])
def test_further_apart_there_is_one_clear_line(ours: str, theirs: str) -> None:
    with running_node("16MiB", start=False, environment={"MOONPOOL_TEST": f"protocol={theirs}"}) as node:
        started(node)
        status, _, errors = use(node, ours)
        assert status == 1
        line = errors.strip().splitlines()[-1]
        assert line.startswith("moonpool.errors.VersionMismatch: ")
        for part in (ours, theirs, "one minor version", "install the same release"):
            assert part in line
        assert use(node, theirs)[1] == "worked\n", "others are served"


def test_a_client_far_apart_is_a_node_unavailable_to_its_engine() -> None:
    assert issubclass(moonpool.VersionMismatch, moonpool.NodeUnavailable)


def test_fields_that_a_later_version_appends_are_passed_over(shared_node: RunningNode) -> None:
    with Raw(shared_node.folder) as raw:
        for message in (
            m.Reserve(2, [b"key"], [5000], m.Options(ttl_s=5.0), [b"m"]),
            m.Acquire(3, [b"no"], True),
            m.Statistics(4),
            m.Match(5, [m.GroupKeys([b"no"], 0, 0, 1)], "hold"),
        ):
            fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
            raw.send_array(*fields, "later", {"field": 1})
            answer = raw.answer()
            assert not isinstance(answer, m.Refused), answer
            assert answer is not None
            assert answer.id == message.id


def test_replies_with_more_fields_than_a_client_knows_decode() -> None:
    reply = msgspec.msgpack.decode(msgspec.msgpack.encode(m.Acquired(1, [0], [5], [0], [9], [1], [0], 1)))
    found = decode_reply(msgspec.msgpack.encode([*reply, {}, "details, and then a later field"]))
    assert isinstance(found, m.Acquired)
    assert found.sizes == [9]


def test_a_message_of_a_kind_that_the_node_does_not_know_closes_only_that_connection(
    shared_node: RunningNode, client: moonpool.Client
) -> None:
    with Raw(shared_node.folder) as raw:
        raw.send_array(60, 2, "a later kind")
        assert "not a request of this protocol" in raw.close_reason()
    assert client.put("key", b"value").stored


def started(node: RunningNode) -> None:
    """Start a node and wait until it answers, also where this process is too far from it to talk to it."""
    process = node.launch()
    deadline = time.monotonic() + 30
    while True:
        try:
            node.connect(prefault=False).close()
            return
        except moonpool.VersionMismatch:
            return
        except moonpool.NodeUnavailable:
            assert process.poll() is None, node.log
            assert time.monotonic() < deadline
        time.sleep(0.02)
