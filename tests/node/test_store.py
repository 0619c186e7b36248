"""The store by itself, without sockets: batches whose parts get in each other's way, full tables, work given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moonpool.node.node as node_module
from moonpool.folder.layout import State
from moonpool.node.node import Node, embedded_node
from moonpool.node.sessions import Session, Standing
from moonpool.node.steps import Steps, finish
from moonpool.status import Status
from moonpool.testing.conformance_node import a_space
from moonpool.wire import messages as m

KIB = 1 << 10


@pytest.fixture
def node() -> Node:
    return embedded_node(1 << 20)


@pytest.fixture
def session(node: Node) -> Session:
    return node.roster.open("test", read_only=False)


def sound(node: Node) -> None:
    """What every place keeps of an object agrees."""
    catalogue, space = node.catalogue, node.catalogue.space
    listed = list(space.oldest())
    assert len(listed) == len(set(listed)), "an object is in the order of use twice"
    for slot in listed:
        assert space.size(slot) > 0, "what owns nothing is in the order of use"
        assert catalogue.state(slot) in (State.RESERVED, State.COMMITTED, State.DOOMED)
    indexed = {slot for shard in catalogue.index for slot in shard.values()}
    assert indexed <= set(listed)
    assert catalogue.live == sum(catalogue.state(slot) == State.COMMITTED for slot in listed)
    assert space.live_bytes == sum(map(space.size, listed))


def put(node: Node, session: Session, keys: list[bytes], size: int, **options: Any) -> list[int]:
    request = m.PutInline(1, keys, [memoryview(bytes(size))] * len(keys), m.Options(**options))
    reply = finish(node.store.put_inline(session, request))
    assert isinstance(reply, m.StatusReply)
    return reply.statuses


def until_it_waits(steps: Steps[Any]) -> None:
    """Take steps until one waits for a change."""
    while next(steps) is None:
        pass


def test_a_batch_that_evicts_its_own_beginning_touches_only_what_is_there(node: Node, session: Session) -> None:
    for round_ in range(20):
        keys = [b"%d %d" % (round_, i) for i in range(17 + round_)]
        assert put(node, session, keys, 64 * KIB) == [0] * len(keys)
        sound(node)


def test_what_others_removed_while_a_batch_paused_is_not_touched(node: Node, session: Session) -> None:
    writing = node.roster.open("writing", read_only=False)
    held = finish(node.store.reserve(writing, m.Reserve(1, [b"held"], [964 * KIB])))
    values = [memoryview(bytes(4 * KIB)), memoryview(bytes(64 * KIB))]
    steps = node.store.put_inline(session, m.PutInline(1, [b"a", b"b"], values, m.Options(wait_s=5)))
    until_it_waits(steps)
    node.store.remove([b"a"], force=False)
    node.store.abort(writing, held.ids)
    for _ in steps:
        pass
    sound(node)
    assert node.catalogue.find(b"b") >= 0 > node.catalogue.find(b"a")


def test_work_given_up_while_it_waits_leaves_nothing_claimed(node: Node, session: Session) -> None:
    writing = node.roster.open("writing", read_only=False)
    held = finish(node.store.reserve(writing, m.Reserve(1, [b"held"], [1 << 20])))
    for request in (
        m.Reserve(1, [b"a"], [4096], m.Options(wait_s=5)),
        m.Reserve(1, [b"held"], [1], m.Options(wait_for_others=True, wait_s=5)),
    ):
        steps = node.store.reserve(session, request)
        until_it_waits(steps)
        assert node.store.waiting == 1
        steps.close()
        assert node.store.waiting == 0
    assert node.catalogue.find(b"a") < 0
    node.store.abort(writing, held.ids)
    assert put(node, session, [b"a"], 4096) == [0]
    sound(node)


def test_two_writers_of_one_key_never_both_have_it(node: Node, session: Session) -> None:
    other = node.roster.open("other", read_only=False)
    first = finish(node.store.reserve(session, m.Reserve(1, [b"key"], [5000])))
    assert finish(node.store.reserve(other, m.Reserve(1, [b"key"], [5000]))).statuses == [Status.IN_PROGRESS]
    waiting = node.store.reserve(other, m.Reserve(1, [b"key"], [5000], m.Options(wait_for_others=True, wait_s=5)))
    until_it_waits(waiting)
    node.roster.end(session, "process-gone")
    with pytest.raises(StopIteration) as stop:
        next(waiting)
    assert stop.value.value.statuses == [0], "the winner has died: the one who waited is the writer"
    assert node.store.commit(session, first.ids, []) == [Status.STALE]
    assert node.store.commit(other, stop.value.value.ids, []) == [0]
    sound(node)


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node with room for 1,024 objects in its table, and for many more in its pool."""
    monkeypatch.setattr(node_module, "default_slots", lambda pool_bytes: 1024)
    return embedded_node(16 << 20)


def test_a_full_table_evicts_like_a_full_pool(small_table: Node) -> None:
    node = small_table
    session = node.roster.open("test", read_only=False)
    for i in range(3000):
        assert put(node, session, [b"%d" % i], 100) == [0]
    assert node.catalogue.live == 1024
    assert [node.catalogue.find(b"%d" % i) >= 0 for i in (0, 1975, 1976, 2999)] == [False, False, True, True]
    sound(node)


def test_a_table_full_of_pinned_objects_says_so(small_table: Node) -> None:
    node = small_table
    session = node.roster.open("test", read_only=False)
    keys = [b"%d" % i for i in range(1024)]
    put(node, session, keys, 100)
    node.store.acquire_slots(session, 1, [node.catalogue.find(key) for key in keys])
    reply = finish(node.store.reserve(session, m.Reserve(1, [b"more"], [100], m.Options(wait_s=0.0))))
    assert reply.statuses == [Status.NO_SPACE]
    assert "1024" in reply.details[0]
    node.roster.end(session, "bye")
    sound(node)


def test_a_commit_asked_again_is_answered_the_same(node: Node, session: Session) -> None:
    reply = finish(node.store.reserve(session, m.Reserve(1, [b"key"], [5000])))
    assert node.store.commit(session, reply.ids, []) == [0]
    assert node.store.commit(session, reply.ids, []) == [0], "the client may not have heard"
    node.store.remove([b"key"], force=False)
    assert node.store.commit(session, reply.ids, []) == [Status.STALE]


def test_the_end_of_a_session_gives_back_all_that_it_holds(node: Node, session: Session) -> None:
    keys = [b"%d" % i for i in range(5)]
    put(node, session, keys, 10_000)
    slots = [node.catalogue.find(key) for key in keys]
    node.store.acquire_slots(session, 1, slots + slots)
    finish(node.holds.match(session, m.Match(1, [m.GroupKeys(keys, 0, 0, 1)], "hold")))
    finish(node.store.reserve(session, m.Reserve(1, [b"new"], [5000])))
    node.store.remove(keys[:2], force=False)
    assert node.catalogue.doomed == 2
    node.roster.end(session, "process-gone")
    assert (node.catalogue.doomed, node.catalogue.live, len(node.holds.by_name)) == (0, 3, 0)
    assert not any(node.store.pins[slot] for slot in range(node.config.slots))
    node.roster.end(session, "process-gone")  # a second time changes nothing
    sound(node)


def test_what_a_barrier_held_is_freed_and_not_evicted_once_it_was_removed(node: Node, session: Session) -> None:
    keys = [b"%d" % i for i in range(250)]
    put(node, session, keys, 4096)
    silent = Session(99, standing=Standing.SILENT)
    node.roster.sessions[99] = silent
    node.roster.recover(np.array([node.catalogue.find(key) for key in keys]), {})
    node.store.remove(keys, force=False)
    assert node.catalogue.doomed == 250
    later: list[Steps[None]] = []
    node.store.background = later.append
    node.roster.end(silent, "lock-gone")
    # Between two steps of giving back, others put the same keys, and evict what they can.
    for steps in later:
        assert put(node, session, keys[:5], 4096) == [0] * 5
        assert put(node, session, [b"large"], 64 * KIB, wait_s=0.0)[0] in (0, Status.NO_SPACE)
        finish(steps)
    assert later, "it took more than one step"
    assert node.catalogue.doomed == 0
    assert not node.store.pins[node.catalogue.find(keys[0])]
    sound(node)


def test_key_spaces_are_found_by_digest_and_refuse_another_description(node: Node) -> None:
    spaces = node.catalogue.spaces
    space = a_space("one")
    number = spaces.declare(space.digest, space.canonical).number
    assert spaces.declare(space.digest, space.canonical).number == number == 1
    assert spaces.number_of(space.key(b"1" * 32)) == 1
    assert spaces.number_of(space.digest + b"not 48 bytes") == 0
    with pytest.raises(Exception, match="declared as"):
        spaces.declare(space.digest, b'{"other":1}')
