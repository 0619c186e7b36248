"""Fifty kills at random under load: no wrong byte, no extent owned twice, nothing left behind.

What would break it: a free run handed out while a view, a copy or a writer has it; a record that a restart takes for
whole when it isn't; a session's end that forgets a pin, or comes before its process is gone.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack

import pytest

import moonpool
from moonpool.folder.layout import State
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.records import extents, overlaps
from moonpool.testing.values import generation_of, value_of
from tests.faults.processes import END_S, kill, load, said, stacks

CLIENTS = 4
KILLS = 50
NODE_KILL_SHARE = 0.4
SEED = int(os.environ.get("TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
KEPT = [f"kept {i}" for i in range(6)]


def committed(node: RunningNode) -> set[bytes]:
    found = extents(node.folder)
    assert not overlaps(found), f"seed {SEED}: an extent is owned twice"
    named = Counter(extent.key for extent in found if extent.state is not State.DOOMED)
    twice = [extent for extent in found if named[extent.key] > 1]
    assert not twice, f"seed {SEED}: a key has two objects: {twice}"
    return {extent.key for extent in found if extent.state is State.COMMITTED}


def kill_node(node: RunningNode) -> None:
    node.kill()
    before = committed(node)
    node.start()
    stats = node.stats()
    assert stats.bad_records == 0, f"seed {SEED}"
    assert stats.recovered == len(before), f"seed {SEED}: a committed object was lost"


def kill_client(node: RunningNode, clients: list[subprocess.Popen[str]], number: int, at: int) -> None:
    kill(clients[at])
    node.signal(signal.SIGSTOP)  # for an exact picture of its records
    committed(node)
    node.signal(signal.SIGCONT)
    clients[at] = load(node.url, SEED + number)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_fifty_kills_under_load_leave_no_wrong_byte_and_nothing_behind() -> None:
    print(f"TEST_SEED={SEED}")
    choose = random.Random(SEED)
    with ExitStack() as stack:
        node = stack.enter_context(running_node("48MiB", checksum_share="20%", scrub_interval="2s"))
        watching = stack.enter_context(node.connect(name="watching", timeout_s=30))
        assert watching.put_many(KEPT, [value_of(key, 7, 500_000) for key in KEPT], pin="hard").all_ok
        filler = [f"key {i}" for i in range(100)]
        watching.put_many(filler, [value_of(key, 1, 500_000) for key in filler])
        views = stack.enter_context(watching.view_many(KEPT))
        assert node.stats().live_bytes > 0.9 * (48 << 20)

        clients = [load(node.url, SEED + number) for number in range(CLIENTS)]

        def end_clients() -> None:
            for client in clients:
                client.kill()
                client.communicate()

        stack.callback(end_clients)
        for number in range(KILLS):
            time.sleep(choose.uniform(0.05, 0.4))
            if choose.random() < NODE_KILL_SHARE:
                kill_node(node)
            else:
                kill_client(node, clients, CLIENTS + number, choose.randrange(CLIENTS))
            for client in clients:
                assert client.poll() is None, client.stderr.read() if client.stderr else ""
            for key, array in zip(KEPT, views, strict=True):
                assert generation_of(key, array) == 7

        for client in clients:
            assert said(client) == "ready"
            client.terminate()
        for client in clients:
            try:
                _, errors = client.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                pytest.fail(f"seed {SEED}: a client doesn't end: {stacks(client)}")
            assert client.returncode == 0, f"seed {SEED}: {errors}"
        del array
        views.close()

        def all_given_back() -> bool:
            stats = watching.stats()
            return not (
                stats.pins
                or stats.reservations
                or stats.holds
                or stats.quarantined_bytes
                or stats.sessions_silent
                or stats.doomed
                or stats.sessions != 1
            )

        eventually(all_given_back, f"seed {SEED}: {node.stats()}")
        for stat in watching.list():
            generation_of(stat.key, watching.get(stat.key))
        assert [generation_of(key, watching.get(key)) for key in KEPT] == [7] * len(KEPT)
        assert not overlaps(extents(node.folder))
        watching.clear()
        with watching.reserve("all", watching.pool_bytes, wait_s=5) as (extent,):
            assert extent.status is moonpool.Status.OK, extent.detail
        assert "Traceback" not in node.log, node.log
