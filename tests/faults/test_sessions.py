"""Who owns what, and until when: sessions follow a living process and the end of its I/O, never a timer or a socket.

What would break it: a session that ends with its socket, or not with its process; extents that are reused before a
client has told what it still holds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import moonpool
from moonpool import Status
from moonpool.client.link import SocketLink
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.values import generation_of, value_of
from moonpool.wire import messages as m
from tests.faults.processes import ended, kill, python, said, tell
from tests.faults.raw import Raw

MIB = 1 << 20

HOLDER = """
import sys, numpy, moonpool
from moonpool.testing.values import value_of
client = moonpool.connect(sys.argv[1], name="holder")
client.put("viewed", value_of("viewed", 1, 1 << 20))
views = client.view("viewed")
filling = client.reserve("filling", 1 << 20)
filling[0].buffer[: 1 << 19] = value_of("filling", 1, 1 << 20)[: 1 << 19]
print("holding", flush=True)
"""
"""A process that holds a view and a half-filled reservation."""


@pytest.fixture
def watching(node: RunningNode) -> Iterator[moonpool.Client]:
    with node.connect(name="watching", timeout_s=30) as client:
        yield client


def held(client: moonpool.Client) -> tuple[int, int]:
    stats = client.stats()
    return stats.pins, stats.reservations


def overwrite(client: moonpool.Client) -> None:
    """Write over everything in the pool that the node lets us have."""
    # Not by `clear`: a purge refuses reservations that began before it.
    for _ in range(2):
        client.remove_many([stat.key for stat in client.list()], force=True)
        keys = [f"other {i}" for i in range(client.pool_bytes // MIB)]
        client.put_many(keys, [np.full(MIB, 255, np.uint8)] * len(keys), wait_s=0)
    client.remove_many(keys)


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until it has stopped."""
    process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


def cut(client: moonpool.Client) -> None:
    """Close the client's socket under it, as a network or a proxy would."""
    assert isinstance(client.link, SocketLink)
    channel = client.link._channel
    assert channel is not None
    channel.sock.shutdown(socket.SHUT_RDWR)


# ---- the process's end -----------------------------------------------------------------------------------------------


def test_what_a_killed_client_held_is_free_once_its_process_is_gone(
    node: RunningNode, watching: moonpool.Client
) -> None:
    with ended(python(HOLDER + "input()", node.url)) as holder:
        assert said(holder) == "holding"
        assert held(watching) == (1, 1)
        kill(holder)
        eventually(lambda: held(watching) == (0, 0))
        assert not watching.exists("filling"), "what was half filled never becomes visible"
        assert watching.put("filling", b"another's") is Status.OK
        assert watching.stats().sessions_ended["process-gone"] == 1


def test_a_killed_clients_waiting_reservation_is_granted_to_nobody(
    node: RunningNode, watching: moonpool.Client
) -> None:
    # Its pins end with it, which makes room for what it still waits for.
    # A child keeps the socket open, so that the end of the process is the first that the node hears of.
    waiter = """
import subprocess, sys, threading, moonpool
client = moonpool.connect(sys.argv[1], name="waiter")
client.put_many(list("abcd"), [bytes(client.pool_bytes // 4)] * 4)
views = client.view_many(list("abcd"))
threading.Thread(target=client.reserve, args=("waited for", client.pool_bytes // 2), kwargs={"wait_s": 5}).start()
fd = client.link._channel.sock.fileno()
child = subprocess.Popen(["sleep", "60"], pass_fds=[fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
input()
"""
    with ended(python(waiter, node.url)) as process:
        child = int(said(process))
        eventually(lambda: watching.stats().reservations_waiting == 1)
        kill(process)
        eventually(lambda: watching.stats().sessions == 1)
        os.kill(child, signal.SIGKILL)
        with watching.reserve("all", watching.pool_bytes, wait_s=2) as (extent,):
            assert extent.status is Status.OK, extent.detail


def test_a_forked_child_that_keeps_the_socket_does_not_keep_the_session(
    node: RunningNode, watching: moonpool.Client
) -> None:
    forking = (
        HOLDER
        + """
import subprocess
fd = client.link._channel.sock.fileno()
child = subprocess.Popen(["sleep", "60"], pass_fds=[fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
input()
"""
    )
    with ended(python(forking, node.url)) as parent:
        assert said(parent) == "holding"
        child = int(said(parent))
        try:
            kill(parent)
            eventually(lambda: held(watching) == (0, 0), "the parent's process is gone, and that counts")
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_without_a_pidfd_the_file_lock_and_two_seconds_tell() -> None:
    with (
        running_node("32MiB", environment={"MOONPOOL_TEST": "no-pidfd"}) as node,
        node.connect() as watching,
        ended(python(HOLDER + "input()", node.url)) as holder,
    ):
        assert said(holder) == "holding"
        kill(holder)
        killed = time.monotonic()
        eventually(lambda: watching.stats().sessions_quarantined == 1)
        assert watching.stats().quarantined_bytes == 2 * MIB
        while time.monotonic() - killed < 1.5:
            assert held(watching) == (1, 1), "its DMA may still write"
            time.sleep(0.1)
        eventually(lambda: held(watching) == (0, 0))
        assert watching.stats().sessions_ended["lock-gone"] == 1


def test_without_a_pidfd_a_child_that_keeps_the_socket_does_not_keep_the_session_either() -> None:
    forking = (
        HOLDER
        + """
import subprocess
fd = client.link._channel.sock.fileno()
child = subprocess.Popen(["sleep", "60"], pass_fds=[fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
input()
"""
    )
    with (
        running_node("32MiB", environment={"MOONPOOL_TEST": "no-pidfd"}) as node,
        node.connect() as watching,
        ended(python(forking, node.url)) as parent,
    ):
        assert said(parent) == "holding"
        child = int(said(parent))
        try:
            kill(parent)
            eventually(lambda: held(watching) == (0, 0))
        finally:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.5)
        assert watching.stats().sessions == 1, "a client that lives keeps its session"


# ---- the connection's end --------------------------------------------------------------------------------------------


def test_a_lost_connection_quarantines_and_reconnecting_goes_on(node: RunningNode, watching: moonpool.Client) -> None:
    with node.connect(name="cut off", timeout_s=30) as client:
        client.put("viewed", value_of("viewed", 1, MIB))
        with client.view("viewed") as views, client.reserve("filling", MIB) as (extent,):
            assert extent.buffer is not None
            extent.buffer[: MIB // 2] = value_of("filling", 1, MIB)[: MIB // 2]
            for _ in range(3):
                cut(client)
                overwrite(watching)
            eventually(lambda: held(watching) == (1, 1) and watching.stats().sessions_quarantined == 0)
            extent.buffer[MIB // 2 :] = value_of("filling", 1, MIB)[MIB // 2 :]
            assert generation_of("filling", extent.buffer) == 1
            assert generation_of("viewed", views[0]) == 1
        assert generation_of("filling", watching.get("filling")) == 1
    eventually(lambda: watching.stats().sessions == 1)
    assert held(watching) == (0, 0)


def test_a_pin_is_kept_though_the_commit_of_its_object_was_not_acknowledged(
    node: RunningNode, watching: moonpool.Client
) -> None:
    # Committed, viewed, removed by another, and cut off before the client has read that its commit came through.
    with Raw(node.folder) as raw:
        reserved = raw.ask(m.Reserve(2, [b"key"], [MIB]))
        assert isinstance(reserved, m.Reserved)
        raw.ask(m.Commit(3, reserved.ids))
        acquired = raw.ask(m.Acquire(4, [b"key"]))
        assert isinstance(acquired, m.Acquired)
        assert acquired.ids == reserved.ids
        watching.remove("key")
        hello = m.Hello(
            1, 1, 0, [], "", "raw", False, raw.welcome.session, raw.welcome.token, raw.welcome.pool_id,
            [(acquired.ids[0], 1)], reserved.ids,
        )  # fmt: skip
        with Raw(node.folder, hello=False) as again:
            answer = again.ask(hello)
            assert isinstance(answer, m.Welcome)
            assert answer.resumed
            assert answer.stale == [], "a client forgets a pin that it is told is stale"
            assert (watching.stats().pins, watching.stats().doomed) == (1, 1)


def test_a_stopped_client_whose_connection_is_lost_keeps_its_extents(
    node: RunningNode, watching: moonpool.Client
) -> None:
    # Its socket is shut down by another holder of it, while the process itself can't even notice.
    code = (
        HOLDER
        + """
import os, socket
from moonpool.testing.values import generation_of
print(client.link._channel.sock.fileno(), flush=True)
input()
filling[0].buffer[1 << 19 :] = value_of("filling", 1, 1 << 20)[1 << 19 :]
assert generation_of("filling", filling[0].buffer) == 1
assert generation_of("viewed", views[0]) == 1
print(filling.commit(), flush=True)
"""
    )
    with ended(python(code, node.url)) as client:
        assert said(client) == "holding"
        number = int(said(client))
        pidfd = os.pidfd_open(client.pid)
        theirs = _fd_of(pidfd, number)
        stop(client)
        socket.socket(fileno=theirs).shutdown(socket.SHUT_RDWR)
        os.close(pidfd)
        eventually(lambda: watching.stats().sessions_quarantined == 1)
        overwrite(watching)
        assert held(watching) == (1, 1)
        assert watching.stats().quarantined_bytes == 2 * MIB
        client.send_signal(signal.SIGCONT)
        eventually(lambda: watching.stats().sessions_quarantined == 0, "it has come back")
        tell(client)
        assert said(client) == "[<Status.OK: 0>]"
    assert generation_of("filling", watching.get("filling")) == 1


def _fd_of(pidfd: int, number: int) -> int:
    """A copy of another process's file descriptor (`pidfd_getfd`)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(438, pidfd, number, 0))
    if found < 0:
        pytest.skip(f"pidfd_getfd isn't allowed here: {os.strerror(ctypes.get_errno())}")
    return found


def test_an_idle_clients_lost_connection_costs_nothing(node: RunningNode, watching: moonpool.Client) -> None:
    with node.connect(name="idle") as client:
        client.put("key", b"value")
        cut(client)
        assert client.get("key") == b"value", "the call itself comes through, over a new connection"
        assert client.exists("key")


def test_a_reservation_that_waits_when_the_connection_is_replaced_is_granted_to_nobody(
    node: RunningNode, watching: moonpool.Client
) -> None:
    with node.connect(name="cut off", timeout_s=1) as client:
        client.put_many(list("abcd"), [bytes(node_bytes := client.pool_bytes // 4)] * 4)
        views = client.view_many(list("abcd"))
        for _ in range(5):
            with pytest.raises((moonpool.RequestTimeout, moonpool.NodeUnavailable)):
                client.reserve("waited for", 2 * node_bytes, wait_s=4)
            cut(client)
        views.close()
        assert client.get("x") is None
        eventually(lambda: held(watching) == (0, 0) and watching.stats().reservations_waiting == 0)


# ---- replies that nobody waits for any more --------------------------------------------------------------------------


def test_what_comes_after_a_timeout_is_given_back_though_no_call_follows(
    node: RunningNode, watching: moonpool.Client
) -> None:
    watching.put("key", b"value")
    with (
        node.connect(name="reading", timeout_s=0.3) as reading,
        node.connect(name="writing", timeout_s=0.3) as writing,
    ):
        node.signal(signal.SIGSTOP)
        try:
            with pytest.raises(moonpool.RequestTimeout):
                reading.get("key")
            with pytest.raises(moonpool.RequestTimeout):
                writing.reserve("filling", 5000)
            with pytest.raises(moonpool.NodeUnavailable, match="overdue"):
                writing.get("key")
        finally:
            node.signal(signal.SIGCONT)
        eventually(lambda: held(watching) == (0, 0))
        assert watching.put("filling", b"another's") is Status.OK
        eventually(lambda: reading.get("key") == b"value")


def test_a_put_whose_node_dies_under_it_leaves_no_reservation(node: RunningNode) -> None:
    with node.connect(timeout_s=30) as client:
        extents = client.reserve("key", MIB)
        node.kill()
        with pytest.raises(moonpool.NodeUnavailable):
            extents.commit()
        node.start()
        eventually(lambda: client.stats().sessions_silent == 0 == client.stats().reservations)
        assert client.put("key", b"again") is Status.OK


# ---- the node's end --------------------------------------------------------------------------------------------------


def test_views_and_copies_go_on_while_the_node_is_gone_and_back(node: RunningNode) -> None:
    with node.connect(timeout_s=30) as client:
        client.put_many(["a", "b"], [value_of(key, 1, 4 * MIB) for key in "ab"])
        views = client.view_many(["a", "b"])
        with client.reserve("c", 4 * MIB) as (extent,):
            assert extent.buffer is not None
            extent.buffer[: 2 * MIB] = value_of("c", 1, 4 * MIB)[: 2 * MIB]
            node.kill()
            with pytest.raises(moonpool.NodeUnavailable, match="moonpool serve"):
                client.get("a")
            with pytest.raises(moonpool.NodeUnavailable):
                client.exists("a")
            assert [generation_of(key, array) for key, array in zip("ab", views, strict=True)] == [1, 1]
            extent.buffer[2 * MIB :] = value_of("c", 1, 4 * MIB)[2 * MIB :]
            node.start()
            eventually(lambda: client.link.attachment.live)
            with node.connect() as other:
                assert [generation_of(key, other.get(key)) for key in "ab"] == [1, 1], "served at once"
                overwrite(other)
            assert [generation_of(key, array) for key, array in zip("ab", views, strict=True)] == [1, 1]
            assert generation_of("c", extent.buffer) == 1
        assert generation_of("c", client.get("c")) == 1, "committed over the restart"
        views.close()
        eventually(lambda: held(client) == (0, 0))


def test_nothing_that_a_silent_session_may_hold_is_reused_until_it_speaks(node: RunningNode) -> None:
    filler = [f"filler {i}" for i in range(24)]
    code = (
        HOLDER
        + """
from moonpool.testing.values import generation_of
input()
assert generation_of("viewed", views[0]) == 1
assert (filling[0].buffer[: 1 << 19] == value_of("filling", 1, 1 << 20)[: 1 << 19]).all()
filling[0].buffer[1 << 19 :] = value_of("filling", 1, 1 << 20)[1 << 19 :]
print(filling.commit(), flush=True)
input()
"""
    )
    with ended(python(code, node.url)) as client:
        assert said(client) == "holding"
        with node.connect() as other:
            other.put_many(filler, [value_of(key, 1, MIB) for key in filler])
        stop(client)
        node.restart()
        with node.connect(timeout_s=30) as other:
            assert other.stats().sessions_silent == 1
            assert generation_of("filler 3", other.get("filler 3")) == 1, "gets are served meanwhile"
            with other.reserve_many(["large", "small"], [8 * MIB, MIB], wait_s=0) as (large, small):
                assert (large.status, small.status) == (Status.NO_SPACE, Status.OK), "only what was free is used"
            assert other.remove("filler 3") is Status.OK
            overwrite(other)
            assert other.stats().quarantined_bytes > 20 * MIB, "removed as it may be, it is not reused"
            client.send_signal(signal.SIGCONT)
            eventually(lambda: other.stats().sessions_silent == 0, "the client has come back and declared itself")
            eventually(lambda: held(other) == (1, 1))
            eventually(lambda: other.stats().quarantined_bytes == 0)
            overwrite(other)
            tell(client)
            assert said(client) == "[<Status.OK: 0>]"
            kill(client)
            assert generation_of("filling", other.get("filling")) == 1


def test_a_session_whose_process_died_while_the_node_was_gone_ends_by_its_lock(node: RunningNode) -> None:
    with ended(python(HOLDER + "input()", node.url)) as client:
        assert said(client) == "holding"
        node.kill()
        kill(client)
        node.start()
        with node.connect() as other:
            assert other.stats().sessions_silent == 1
            eventually(lambda: held(other) == (0, 0) and other.stats().quarantined_bytes == 0)
            assert other.stats().sessions_ended["lock-gone"] == 1
            assert not other.exists("filling")
            assert other.exists("viewed")


def test_a_silent_living_process_keeps_the_pool_only_until_the_stated_bound() -> None:
    looking = HOLDER + "input()\nassert (views[0] == value_of('viewed', 1, 1 << 20)).all()\nprint('right', flush=True)"
    with (
        running_node("16MiB", reconnect_grace="1s") as node,
        ended(python(looking, node.url)) as client,
    ):
        assert said(client) == "holding"
        with node.connect() as other:
            other.put_many([str(i) for i in range(14)], [bytes(MIB)] * 14)
            pool_id = other.stats().pool_id
        stop(client)
        node.restart()
        with node.connect(timeout_s=30) as other:
            time.sleep(1.2)
            assert other.stats().pool_id == pool_id, "space has not run out yet"
            assert other.put("large", bytes(8 * MIB), wait_s=0) is Status.NO_SPACE

            def replaced() -> bool:
                with suppress(moonpool.NodeUnavailable):  # one that comes in the moment of it has to come again
                    return node.stats().pool_id != pool_id
                return False

            eventually(replaced, "a new pool")
            assert "did not come back" in node.log
            eventually(lambda: other.put("large", bytes(8 * MIB), wait_s=1) is Status.OK)
            client.send_signal(signal.SIGCONT)
            tell(client)
            assert said(client) == "right", "its view of the old pool is as it was"


def test_a_clean_stop_is_a_restart_like_any_other(node: RunningNode) -> None:
    with node.connect(timeout_s=30) as client:
        client.put("key", value_of("key", 1, MIB))
        with client.view("key") as views:
            assert node.stop() == 0
            assert not (node.folder / "node.sock").exists()
            node.start()
            eventually(lambda: client.link.attachment.live)
            overwrite(client)
            assert generation_of("key", views[0]) == 1
        assert client.stats().incarnation == 2


# ---- namespaces ------------------------------------------------------------------------------------------------------


def allowed(*command: str) -> bool:
    """Whether the sandbox lets us run `command`."""
    return subprocess.run([*command, "true"], capture_output=True).returncode == 0


def test_a_client_in_a_pid_namespace_of_its_own_ends_with_its_process(
    node: RunningNode, watching: moonpool.Client
) -> None:
    unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if not allowed(*unshare):
        pytest.skip("this sandbox doesn't allow pid namespaces")
    code = HOLDER + "import os\nprint(os.getpid(), flush=True)\ninput()"
    with ended(python(code, node.url, prefix=unshare)) as client:
        assert said(client) == "holding"
        assert said(client) == "1", "it is the first process of its namespace"
        assert held(watching) == (1, 1)
        kill(client)
        eventually(lambda: held(watching) == (0, 0))
        assert watching.stats().sessions_ended["process-gone"] == 1


def test_a_node_in_a_sibling_pid_namespace_knows_its_clients_by_their_pidfd() -> None:
    unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if not allowed(*unshare):
        pytest.skip("this sandbox doesn't allow pid namespaces")
    with (
        running_node("32MiB", prefix=unshare) as node,
        node.connect() as watching,
        ended(python(HOLDER + "input()", node.url, prefix=unshare)) as client,
    ):
        assert said(client) == "holding"
        oldest = watching.stats().oldest_pin
        assert oldest is not None
        assert (oldest.owner, oldest.pid) == ("holder", 0), "a pid means nothing across namespaces"
        kill(client)
        eventually(lambda: held(watching) == (0, 0))
