"""Node and clients that share nothing but the folder: other uids, pid and mount namespaces, a memory cgroup.

What would break it: a file that only its owner may open, a path or pid that means something else on the other side,
a decision that rests on a signal or on /proc.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import moonpool
from moonpool.testing.node import eventually, running_node
from moonpool.testing.values import generation_of, value_of
from tests.faults.processes import ended, kill, python, said, tell

MIB = 1 << 20
NODE_UID, FIRST_UID, SECOND_UID, STRANGER_UID, GROUP = 64_001, 64_002, 64_003, 64_004, 64_100
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")

CLIENT = """
import os, sys, moonpool
from moonpool.testing.values import generation_of, value_of
try:
    client = moonpool.connect(sys.argv[1], name=sys.argv[2], timeout_s=30, read_only=len(sys.argv) > 3)
except moonpool.NodeUnavailable as error:
    print("refused:", error, flush=True)
    raise SystemExit(0)
print(os.getuid(), os.getpid(), flush=True)
views = None
for line in sys.stdin:
    what, _, key = line.strip().partition(" ")
    if what == "put":
        print(client.put(key, value_of(key, 1, 2 << 20)).name, flush=True)
    elif what == "get":
        print(generation_of(key, client.get(key)), flush=True)
    elif what == "view":
        views = client.view(key)
        print(generation_of(key, views[0]), flush=True)
    elif what == "look":
        print(generation_of(key, views[0]), flush=True)
"""


def can(*command: str) -> bool:
    return subprocess.run([*command, "true"], capture_output=True).returncode == 0


def as_user(uid: int, *groups: int) -> tuple[str, ...]:
    """A prefix that runs a command as another user, who can read what Python is made of, in a mount namespace."""
    listed = ("--groups", ",".join(map(str, groups))) if groups else ("--clear-groups",)
    user = ("setpriv", "--reuid", str(uid), "--regid", str(uid), *listed)
    return ("unshare", "--mount", "sh", "-ec", _openings() + 'exec "$@"', "sh", *user)


def _openings() -> str:
    """Shell commands that lay open, in a mount namespace, what lies in a folder that is closed to others."""
    needed = {Path(path).resolve() for path in (*sys.path, sys.prefix, sys.base_prefix) if path and Path(path).is_dir()}
    closed: dict[Path, list[Path]] = {}
    for path in needed:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                closed.setdefault(folder, []).append(path)
                break
    script = ""
    for folder, paths in closed.items():
        outermost = [path for path in paths if not any(other in path.parents for other in paths)]
        for number, path in enumerate(outermost):
            script += f"stash{number}=$(mktemp -d); mount --bind '{path}' $stash{number}; "
        script += f"mount -t tmpfs -o mode=755 none '{folder}'; "
        for number, path in enumerate(outermost):
            script += f"mkdir -p '{path}'; mount --move $stash{number} '{path}'; rmdir $stash{number}; "
    return script


@pytest.fixture(scope="module", autouse=True)
def other_users() -> None:
    if os.geteuid() != 0 or not can(*as_user(FIRST_UID)):
        pytest.skip("this sandbox doesn't allow to become another user")


@pytest.fixture
def memory_cgroup() -> Iterator[tuple[str, ...]]:
    """A command's prefix that runs it in a memory cgroup of its own; empty where there can be none."""
    folder = MEMORY_CGROUP / f"moonpool-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError:
        yield ()
        return
    try:
        yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    finally:
        eventually(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


@pytest.fixture
def apart() -> tuple[str, ...]:
    """A prefix that runs a command in pid, mount, ipc, uts and network namespaces of its own."""
    command = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--uts", "--net")
    if not can(*command):
        pytest.skip("this sandbox doesn't allow namespaces")
    return command


def test_nothing_need_be_shared_but_the_folder(apart: tuple[str, ...], memory_cgroup: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        node = stack.enter_context(
            running_node(
                "32MiB", start=False, prefix=(*apart, *as_user(NODE_UID, GROUP)), folder_mode="0770", group=GROUP
            )
        )
        os.chown(node.folder.parent, NODE_UID, GROUP)
        node.start()
        assert node.folder.stat().st_uid == NODE_UID
        assert node.folder.stat().st_gid == GROUP

        def client(uid: int, name: str, *more: str) -> subprocess.Popen[str]:
            prefix = (*memory_cgroup, *apart, *as_user(uid, GROUP))
            return stack.enter_context(ended(python(CLIENT, node.url, name, *more, prefix=prefix)))

        writer, reader = client(FIRST_UID, "writer"), client(SECOND_UID, "reader", "read-only")
        assert said(writer) == f"{FIRST_UID} 1"
        assert said(reader) == f"{SECOND_UID} 1", "each is the first process of its pid namespace"
        tell(writer, "put key")
        assert said(writer) == "OK"
        for what in ("get", "view"):
            tell(reader, f"{what} key")
            assert said(reader) == "1"

        kill(writer)
        node.restart()
        tell(reader, "look key")
        assert said(reader) == "1", "its view outlives the node"
        with node.connect() as watching:  # as root
            eventually(lambda: watching.stats().sessions_silent == 0)
            assert watching.stats().pins == 1, "it has come back by itself"
            assert generation_of("key", watching.get("key")) == 1
            kill(reader)
            eventually(lambda: watching.stats().pins == 0)

        stranger = stack.enter_context(ended(python(CLIENT, node.url, "stranger", prefix=as_user(STRANGER_UID))))
        assert said(stranger).startswith("refused: ")


def test_another_users_folder_is_private_by_default() -> None:
    with running_node("16MiB") as node:
        assert node.folder.stat().st_mode & 0o777 == 0o700
        with ended(python(CLIENT, node.url, "stranger", prefix=as_user(STRANGER_UID))) as stranger:
            assert said(stranger).startswith("refused: ")


def test_a_node_refuses_a_folder_that_is_somebody_elses() -> None:
    with running_node("16MiB", start=False, prefix=as_user(FIRST_UID)) as node:
        node.folder.mkdir()
        node.folder.chmod(0o777)
        assert node.launch().wait(30) == 1
        assert "belongs to uid 0" in node.log


def test_a_client_does_not_trust_a_folder_that_everybody_may_write_to() -> None:
    with running_node("16MiB") as node:
        os.chown(node.folder, STRANGER_UID, -1)
        node.folder.chmod(0o777)
        with pytest.raises(moonpool.NodeUnavailable, match="writable by everybody"):
            moonpool.connect(node.url)


def test_a_clients_memory_cgroup_does_not_bound_the_pool(memory_cgroup: tuple[str, ...]) -> None:
    if not memory_cgroup:
        pytest.skip("this sandbox doesn't allow a memory cgroup")
    limit = Path(memory_cgroup[2].split("> ")[1].split("/cgroup.procs")[0]) / "memory.limit_in_bytes"
    with running_node("256MiB") as node, node.connect() as filling:
        eventually(lambda: filling.stats().touched_bytes == 256 * MIB)
        for i in range(60):
            filling.put(f"key {i}", value_of(f"key {i}", 1, 2 * MIB))
        limit.write_text(str(160 * MIB))
        # It maps and reads more of the pool than its cgroup may have: the pages are the node's.
        with ended(python(CLIENT, node.url, "bounded", prefix=memory_cgroup)) as client:
            said(client)
            for i in range(60):
                tell(client, f"get key {i}")
                assert said(client) == "1"
