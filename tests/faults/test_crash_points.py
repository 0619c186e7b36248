"""Each named crash point, killed with -9 there once: the node is whole again after it, and nothing is left behind.

What would break it: a store in another order (state word before body, table before state), a reservation or pin that
is noted after the reply, a session's file that doesn't count before its first extent.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

import moonpool
from moonpool import NodeUnavailable, Status
from moonpool.folder.layout import State
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.records import extents, overlaps
from moonpool.testing.values import generation_of, value_of
from tests.faults.processes import END_S, ended, load, stacks

NODE_POINTS = (
    "node-session-file", "node-allocated", "node-record-body", "node-made-room", "node-evicting", "node-reserved",
    "node-inline-filled", "node-record-state", "node-committed", "node-acquired", "node-purging", "node-purge-saved",
)  # fmt: skip
CLIENT_POINTS = (
    "client-unlocked", "client-reserved", "client-filled", "client-commit-sent", "client-acquired", "client-copying",
    "client-copied",
)  # fmt: skip
MIB = 1 << 20
KEPT = [f"kept {i}" for i in range(3)]


class Living:
    """A client that lives through it all: it holds views and a half-filled reservation."""

    def __init__(self, node: RunningNode) -> None:
        self.client = node.connect(name="living", timeout_s=30)
        assert self.client.put_many(KEPT, [value_of(key, 3, MIB) for key in KEPT], pin="hard").all_ok
        self.views = self.client.view_many(KEPT)
        self.filling = self.client.reserve("half", MIB)
        self.buffer = self.filling[0].buffer
        assert self.buffer is not None
        self.buffer[: MIB // 2] = value_of("half", 3, MIB)[: MIB // 2]

    def goes_on(self) -> None:
        """What it holds is as it was, and it can finish what it began."""
        assert [generation_of(key, array) for key, array in zip(KEPT, self.views, strict=True)] == [3] * 3
        assert self.buffer is not None
        self.buffer[MIB // 2 :] = value_of("half", 3, MIB)[MIB // 2 :]
        assert generation_of("half", self.buffer) == 3, "nobody else wrote into it"
        assert self.filling.commit() == [Status.OK]
        assert generation_of("half", self.client.get("half")) == 3
        self.buffer = None
        self.views.close()


def work(client: moonpool.Client) -> None:
    """Comes by every crash point of a node's."""
    for round_ in range(3):
        small = [f"small {round_} {i}" for i in range(50)]
        client.put_many(small, [value_of(key, 1, 20_000) for key in small])
        large = [f"large {round_} {i}" for i in range(6)]
        client.put_many(large, [value_of(key, 1, 2 * MIB) for key in large])
        client.get_many_into(large, [bytearray(2 * MIB) for _ in large])
    client.put("long", value_of("long", 1, 5000), metadata=b"m" * 1000)
    client.purge(older_than_s=3600)
    with client.reserve("more", 4 * MIB) as (extent,):
        assert extent.buffer is not None
        extent.buffer[:] = value_of("more", 1, 4 * MIB)


def nothing_is_held_but_by(client: moonpool.Client, sessions: int = 1) -> None:
    def given_back() -> bool:
        stats = client.stats()
        return (
            not (stats.pins or stats.reservations or stats.quarantined_bytes or stats.doomed or stats.sessions_silent)
            and stats.sessions == sessions
        )

    eventually(given_back, "all is given back")
    client.clear()
    with client.reserve("all", client.pool_bytes, wait_s=5) as (extent,):
        assert extent.status is Status.OK, extent.detail


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """One run for each point that is asked for, several at a time: most of it is waiting for processes."""
    wanted = {
        item.callspec.params["point"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_a_node_killed_there_comes_back_whole"
    }
    with ThreadPoolExecutor(4) as executor:
        yield {point: executor.submit(kill_node_at, point) for point in NODE_POINTS if point in wanted}


@pytest.mark.parametrize("point", NODE_POINTS)
def test_a_node_killed_there_comes_back_whole(point: str, runs: dict[str, Future[None]]) -> None:
    runs[point].result(60)


def kill_node_at(point: str) -> None:
    with running_node("24MiB", prefault=False) as node:
        living = Living(node)
        # The same pool, by a node that dies at its third coming to the point.
        node.stop()
        node.environment = {"MOONPOOL_TEST": f"crash={point}:{1 if point.startswith('node-pur') else 3}"}
        node.start() if point != "node-session-file" else node.launch()
        assert node.process is not None
        while node.process.poll() is None:  # it may not be there yet, or go under us
            with suppress(NodeUnavailable), node.connect(name="worker", timeout_s=30) as worker:
                work(worker)
        assert node.wait() == -signal.SIGKILL, f"the node went by {point}: {node.log}"
        found = extents(node.folder)
        assert not overlaps(found)
        node.environment = {}
        node.start()
        stats = node.stats()
        assert (stats.recovered, stats.bad_records) == (sum(e.state is State.COMMITTED for e in found), 0)
        living.goes_on()
        for stat in living.client.list():
            assert generation_of(stat.key, living.client.get(stat.key, verify=True)) in (1, 3)
        assert living.client.exists_many(KEPT) == [True] * 3
        nothing_is_held_but_by(living.client)
        assert not overlaps(extents(node.folder))
        living.client.close()


@pytest.mark.parametrize("point", ["node-recovered", "node-resuming"])
def test_a_node_killed_while_it_comes_back_comes_back(point: str) -> None:
    with running_node("24MiB", prefault=False) as node:
        living = Living(node)
        node.kill()
        node.environment = {"MOONPOOL_TEST": f"crash={point}"}
        node.launch()
        assert node.wait(END_S) == -signal.SIGKILL
        node.environment = {}
        node.start()
        living.goes_on()
        nothing_is_held_but_by(living.client)
        living.client.close()


@pytest.fixture(scope="module")
def beside() -> Iterator[RunningNode]:
    with running_node("24MiB", prefault=False) as node:
        yield node


@pytest.mark.parametrize("point", CLIENT_POINTS)
def test_a_client_killed_there_leaves_nothing_behind(beside: RunningNode, point: str) -> None:
    living = Living(beside)
    time = 1 if point == "client-unlocked" else 2
    with ended(load(beside.url, 5, test=f"crash={point}:{time}")) as dying:
        try:
            assert dying.wait(END_S) == -signal.SIGKILL, dying.stderr.read() if dying.stderr else ""
        except subprocess.TimeoutExpired:
            pytest.fail(f"the client never came to {point}: {stacks(dying)}")
    eventually(lambda: living.client.stats().reservations == 1, "its reservations are free")
    living.goes_on()
    for stat in living.client.list():
        generation_of(stat.key, living.client.get(stat.key))
    nothing_is_held_but_by(living.client)
    assert not overlaps(extents(beside.folder))
    living.client.close()
