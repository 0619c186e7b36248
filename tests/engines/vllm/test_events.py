from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moonpool
from moonpool.client.feed import Event
from moonpool.engines.vllm.events import Change, Object, Residents, Scope, Watcher
from moonpool.engines.vllm.notes import encode_note
from moonpool.errors import NodeUnavailable

SPACES = [bytes([i]) * 16 for i in range(4)]
SCOPE, OTHER = Scope("", 0), Scope("", 1)
DIGESTS = [bytes([100 + i]) * 32 for i in range(4)]
A, B, C, _ = (Object(SCOPE, digest) for digest in DIGESTS)


def event(kind: str, space: int = 0, digest: int = 0, note: bytes = b"") -> Event:
    return Event(0, kind, SPACES[space] + DIGESTS[digest], metadata=note)


def residents(*shards: int) -> Residents:
    made = Residents()
    made.watch({SCOPE: [SPACES[i] for i in shards or (0,)]})
    return made


def told(made: Residents) -> list[tuple[Object, bool]]:
    return [(change.object, change.stored) for change in made.take(1000)]


def test_an_object_is_stored_when_its_last_shard_is_there_and_removed_when_the_first_goes() -> None:
    made = residents(0, 1)
    made.apply(event("stored", 0))
    assert told(made) == []
    made.apply(event("stored", 1))
    assert told(made) == [(A, True)]
    made.apply(event("removed", 1))
    assert told(made) == [(A, False)]
    made.apply(event("removed", 0))
    assert told(made) == []


def test_kv_groups_are_told_apart() -> None:
    made = Residents()
    made.watch({SCOPE: [SPACES[0]], OTHER: [SPACES[1]]})
    made.apply(event("stored", 1))
    assert told(made) == [(Object(OTHER, DIGESTS[0]), True)]


def test_other_engines_key_spaces_are_not_told() -> None:
    made = residents(0)
    made.apply(event("stored", 3))
    made.apply(Event(0, "stored", b"a key of somebody else's"))
    assert told(made) == []


def test_nothing_is_told_twice() -> None:
    made = residents(0)
    for _ in range(2):
        made.apply(event("stored"))
    assert told(made) == [(A, True)]
    made.apply(event("stored"))
    assert told(made) == []
    for _ in range(2):
        made.apply(event("removed"))
    assert told(made) == [(A, False)]
    assert told(made) == []


def test_what_is_undone_before_anybody_asked_is_not_told() -> None:
    made = residents(0)
    made.apply(event("stored"))
    made.apply(event("removed"))
    assert told(made) == []


def test_a_chains_objects_are_told_from_its_head_on_whatever_order_they_come_in() -> None:
    made = residents(0)
    for digest in (2, 0, 1):
        made.apply(event("stored", 0, digest, encode_note(DIGESTS[digest - 1] if digest else b"", [1])))
    assert told(made) == [(A, True), (B, True), (C, True)]


def test_the_note_comes_with_the_change() -> None:
    made = residents(0)
    note = encode_note(DIGESTS[1], [5, 6, 7], "an adapter")
    made.apply(event("stored", note=note))
    assert made.take(10) == [Change(A, True, note)]


def test_a_snapshot_tells_the_difference_to_what_was_told() -> None:
    made = residents(0)
    for digest in (0, 1):
        made.apply(event("stored", 0, digest))
    assert told(made) == [(A, True), (B, True)]
    made.begin()
    for digest in (1, 2):
        made.apply(event("snapshot", 0, digest))
    assert told(made) == []  # it may be incomplete until it has ended
    made.apply(Event(0, "snapshot-end"))
    assert told(made) == [(A, False), (C, True)]


def test_a_snapshot_that_broke_off_counts_for_nothing() -> None:
    made = residents(0)
    made.apply(event("snapshot", 0, 0))
    made.begin()
    made.apply(event("snapshot", 0, 1))
    made.apply(Event(0, "snapshot-end"))
    assert told(made) == [(B, True)]


def test_an_empty_pool_after_a_full_one_is_told() -> None:
    made = residents(0)
    made.apply(event("stored"))
    assert told(made) == [(A, True)]
    made.begin()
    made.apply(Event(0, "snapshot-end"))
    assert told(made) == [(A, False)]


def test_a_lost_pool_is_told_as_removals() -> None:
    made = residents(0)
    made.apply(event("stored"))
    assert told(made) == [(A, True)]
    made.lose()
    assert told(made) == [(A, False)]


def test_new_key_spaces_end_what_was_told_of_the_old_ones() -> None:
    made = residents(0)
    made.apply(event("stored"))
    assert told(made) == [(A, True)]
    made.watch({OTHER: [SPACES[1]]})
    assert told(made) == [(A, False)]
    made.apply(event("removed", 0))
    assert told(made) == []


def test_as_many_are_told_at_once_as_asked_for() -> None:
    made = residents(0)
    for digest in range(4):
        made.apply(event("stored", 0, digest))
    assert [len(made.take(3)), len(made.take(3)), len(made.take(3))] == [3, 1, 0]


STEP = st.one_of(
    st.tuples(st.sampled_from(["stored", "removed"]), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.sampled_from(["take", "snapshot", "lose"]), st.just(0), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
def test_what_was_told_adds_up_to_what_is_there(steps: list[tuple[str, int, int]]) -> None:
    made = Residents()
    made.watch({SCOPE: SPACES[:2], OTHER: SPACES[2:3]})
    there: set[tuple[int, int]] = set()
    known: set[Object] = set()

    def take() -> None:
        for change in made.take(2):
            assert (change.object in known) != change.stored, "told twice"
            (known.add if change.stored else known.discard)(change.object)

    for kind, space, digest in [*steps, ("snapshot", 0, 0)]:
        if kind == "take":
            take()
        elif kind == "lose":
            made.lose()
            there.clear()
        elif kind == "snapshot":
            made.begin()
            for one in sorted(there):
                made.apply(event("snapshot", *one))
            made.apply(Event(0, "snapshot-end"))
        else:
            (there.add if kind == "stored" else there.discard)((space, digest))
            made.apply(event(kind, space, digest))
    for _ in range(20):
        take()
    whole = {Object(SCOPE, DIGESTS[d]) for d in range(4) if {(0, d), (1, d)} <= there}
    assert known == whole | {Object(OTHER, DIGESTS[d]) for d in range(4) if (2, d) in there}


# ---- the thread, over a real node in this process --------------------------------------------------------------------


def eventually(taken: Callable[[], Any], wanted: Any, wait_s: float = 10.0) -> None:
    found: list[Any] = []
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        found += taken()
        if found == wanted:
            return
        time.sleep(0.005)
    assert found == wanted


def changes(watcher: Watcher) -> Callable[[], list[tuple[Object, bool]]]:
    return lambda: [(change.object, change.stored) for change in watcher.take()]


def test_the_watcher_tells_what_was_there_before_and_what_comes_and_goes() -> None:
    with moonpool.connect("embedded:16MiB") as client:
        client.put(SPACES[0] + DIGESTS[0], b"x" * 1000)
        watcher = Watcher(client, lambda: True)
        try:
            watcher.watch({SCOPE: [SPACES[0]]})
            eventually(changes(watcher), [(A, True)])
            client.put(SPACES[0] + DIGESTS[1], b"x" * 1000)
            eventually(changes(watcher), [(B, True)])
            client.remove(SPACES[0] + DIGESTS[0])
            eventually(changes(watcher), [(A, False)])
            client.clear()
            eventually(changes(watcher), [(B, False)])
            watcher.watch({SCOPE: [SPACES[0]], OTHER: [SPACES[1]]})
            client.put(SPACES[1] + DIGESTS[2], b"x" * 1000)
            eventually(changes(watcher), [(Object(OTHER, DIGESTS[2]), True)])
        finally:
            watcher.close()


class Feed:
    """A feed that plays what it is given, and then fails, ends or waits."""

    def __init__(self, events: list[Event], ends: str) -> None:
        self.events, self.ends = list(events), ends

    def poll(self, timeout_s: float = 0.0) -> Event | None:
        if self.events:
            return self.events.pop(0)
        if self.ends == "gone":
            raise NodeUnavailable("the node closed the feed")
        time.sleep(min(timeout_s, 0.01))
        return None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Node:
    """Gives one feed after another."""

    def __init__(self, *feeds: Feed) -> None:
        self.feeds = list(feeds)
        self.waiting = threading.Event()

    def subscribe(self, snapshot: bool = False) -> Any:
        assert snapshot
        if not self.feeds:
            self.waiting.set()
            raise NodeUnavailable("no node answers")
        return self.feeds.pop(0)


END = Event(0, "snapshot-end")


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        # What a lagged feed has left out, the next snapshot tells: B has gone meanwhile, C has come.
        (
            Feed([event("snapshot", 0, 0), event("snapshot", 0, 1), END, Event(9, "lagged")], "waits"),
            [(A, True), (C, True)],
        ),
        (Feed([event("snapshot", 0, 0), event("snapshot", 0, 1), END], "gone"), [(A, True), (C, True)]),
    ],
    ids=["lagged", "node gone and back"],
)
def test_a_feed_that_breaks_is_taken_up_again(first: Feed, wanted: list[tuple[Object, bool]]) -> None:
    node = Node(first, Feed([event("snapshot", 0, 0), event("snapshot", 0, 2), END], "waits"))
    watcher = Watcher(node, lambda: True)
    try:
        watcher.watch({SCOPE: [SPACES[0]]})
        known: set[Object] = set()
        end = time.monotonic() + 10
        while known != {A, C} and time.monotonic() < end:
            for change in watcher.take():
                assert (change.object in known) != change.stored, "told twice"
                (known.add if change.stored else known.discard)(change.object)
            time.sleep(0.001)
        assert known == {known for known, _ in wanted}
    finally:
        watcher.close()


def test_a_node_that_stays_away_leaves_nothing_told() -> None:
    node = Node(Feed([event("snapshot", 0, 0), END], "waits"))
    feed = node.feeds[0]
    watcher = Watcher(node, lambda: True)
    try:
        watcher.watch({SCOPE: [SPACES[0]]})
        eventually(changes(watcher), [(A, True)])
        feed.ends = "gone"
        eventually(changes(watcher), [(A, False)])
        assert node.waiting.wait(10)
    finally:
        watcher.close()
