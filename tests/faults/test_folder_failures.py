"""What failure looks like, where it comes from the folder: a clear error or a fresh pool with a warning, never a crash.

What would break it: memory handed out before it is reserved (SIGBUS when the file system is full), a pool taken over
whose records say something else, a lock that outlives its node.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import moonpool
from moonpool import Status
from moonpool.folder.layout import RECORD_BYTES, Field, Flag
from moonpool.folder.records import Records
from moonpool.testing.conformance_node import a_space
from moonpool.testing.node import RunningNode, eventually, running_node
from moonpool.testing.records import extents
from moonpool.testing.values import generation_of, value_of
from tests.faults.processes import ended, kill, python, said

MIB = 1 << 20


def fill(client: moonpool.Client, *keys: str) -> None:
    assert client.put_many(keys, [value_of(key, 1, MIB) for key in keys]).all_ok


# ---- files that are gone, cut or of another kind ---------------------------------------------------------------------


def remove_pool(node: RunningNode) -> None:
    (node.folder / "pool").unlink()


def cut_pool(node: RunningNode) -> None:
    os.truncate(node.folder / "pool", 5 * MIB)


def cut_records(node: RunningNode) -> None:
    os.truncate(node.folder / "records", 100_000)


def empty_records(node: RunningNode) -> None:
    (node.folder / "records").write_bytes(b"")


def another_layout(node: RunningNode) -> None:
    with (node.folder / "records").open("r+b") as file:
        file.seek(8)
        file.write((999).to_bytes(8, "little"))


def another_size(node: RunningNode) -> None:
    node.options["pool"] = "24MiB"


def other_slots(node: RunningNode) -> None:
    node.options["slots"] = "70000"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove_pool, "pool file is gone"),
        (cut_pool, "cut to 5242880 bytes"),
        (cut_records, "records are missing, cut short or of another version"),
        (empty_records, "records are missing, cut short or of another version"),
        (another_layout, "records are missing, cut short or of another version"),
        (another_size, "25165824 are wanted"),
        (other_slots, "70000 are wanted"),
    ],
)
def test_a_pool_that_cannot_be_gone_on_with_is_replaced_with_a_warning(
    node: RunningNode, damage: Callable[[RunningNode], None], named: str
) -> None:
    with node.connect(timeout_s=30) as client:
        fill(client, "old")
        with client.view("old") as views:
            node.kill()
            if damage is cut_pool:
                views.close()  # cutting a live file is what nobody survives; see docs/operations.md
            damage(node)
            node.start()
            assert "is not taken over" in node.log
            assert named in node.log
            eventually(lambda: client.link.attachment.live)
            assert not client.exists("old")
            assert client.put("new", value_of("new", 1, MIB)) is Status.OK, "the client goes on with the fresh pool"
            if damage is not cut_pool:
                assert generation_of("old", views[0]) == 1, "and its views of the old one stay right"
        eventually(lambda: client.stats().pins == 0)
        stats = client.stats()
        assert (stats.recovered, stats.sessions, stats.sessions_silent) == (0, 1, 0)


def test_the_pool_file_removed_under_a_running_node_harms_no_client_that_has_it(node: RunningNode) -> None:
    with node.connect() as client:
        fill(client, "a")
        (node.folder / "pool").unlink()
        fill(client, "b")
        assert generation_of("a", client.get("a")) == 1
        with pytest.raises(moonpool.NodeUnavailable, match="pool"):
            node.connect()


def test_the_folder_gone_altogether_is_one_clear_line() -> None:
    with pytest.raises(moonpool.NodeUnavailable, match="moonpool serve --dir /dev/shm/none-such"):
        moonpool.connect("unix:/dev/shm/none-such")


# ---- records that are wrong ------------------------------------------------------------------------------------------


def set_field(node: RunningNode, slot: int, field: int, value: int) -> None:
    with (node.folder / "records").open("r+b") as file:
        file.seek(Records.reserved_bytes(0) + slot * RECORD_BYTES + 8 * field)
        file.write(value.to_bytes(8, "little"))


def test_records_that_cannot_be_right_are_dropped_and_counted(node: RunningNode) -> None:
    wrong = {
        "offset beyond the pool": (Field.OFFSET, 1 << 40),
        "offset between granules": (Field.OFFSET, 4097),
        "size beyond the pool": (Field.SIZE, 1 << 40),
        "size of nothing": (Field.SIZE, 0),
        "huge size": (Field.SIZE, (1 << 64) - 1),
        "fingerprint of another key": (Field.FINGERPRINT, 12345),
        "unknown state": (Field.STATE, 77),
        "key length of nothing": (Field.FLAGS, 0),
        "key length beyond the limit": (Field.FLAGS, 0xFFF << 8),
        "overflow entry beyond the file": (Field.FLAGS, int(Flag.OVERFLOW) | 22 << 8 | 0xFFFF_FFFF << 32),
        "another key": (Field.KEY, 1),
    }
    keys = [*wrong, "right", "too"]
    with node.connect() as client:
        for key in keys:
            fill(client, key)
    node.kill()
    slots = {extent.key.decode(): extent.slot for extent in extents(node.folder)}
    for key, (field, value) in wrong.items():
        set_field(node, slots[key], field, value)
    node.start()
    with node.connect() as client:
        stats = client.stats()
        assert (stats.bad_records, stats.recovered) == (len(wrong), 2)
        assert client.exists_many(keys) == [False] * len(wrong) + [True, True]
        assert generation_of("right", client.get("right", verify=True)) == 1
        assert client.put_many(list(wrong), [value_of(key, 2, MIB) for key in wrong]).all_ok, "their memory is free"
        assert generation_of("right", client.get("right")) == 1


def test_of_two_records_that_overlap_one_is_dropped(node: RunningNode) -> None:
    with node.connect() as client:
        fill(client, "a", "b")
    node.kill()
    first, second = extents(node.folder)
    set_field(node, second.slot, Field.OFFSET, first.offset + 4096)
    node.start()
    assert node.stats().bad_records == 1
    with node.connect() as client:
        assert client.exists_many([first.key, second.key]) == [True, False]


def test_a_view_of_an_object_whose_record_was_lost_ends_quietly(node: RunningNode) -> None:
    with node.connect(timeout_s=30) as client:
        fill(client, "a", "b")
        views = client.view_many(["a", "b"])
        node.kill()
        set_field(node, extents(node.folder)[0].slot, Field.FINGERPRINT, 5)
        node.start()
        eventually(lambda: client.stats().pins == 1, "only what the node still knows is declared")
        views.close()
        eventually(lambda: client.stats().pins == 0)
        assert client.put("c", b"the client goes on") is Status.OK


def test_key_spaces_that_were_lost_cost_their_labels_alone(node: RunningNode) -> None:
    space = a_space("lost")
    key = space.key(b"1" * 32)
    with node.connect(timeout_s=30) as client:
        client.declare(space)
        client.put(key, b"value")
        with client.reserve(space.key(b"2" * 32), 5000):
            node.kill()
            (node.folder / "spaces").write_text("not a registry")
            node.start()
            eventually(lambda: client.link.attachment.live)
        assert client.get(key) == b"value"
        assert client.exists(space.key(b"2" * 32)), "what was being written is committed all the same"
        assert client.purge(older_than_s=1e-3) == 2


# ---- one node a folder -----------------------------------------------------------------------------------------------


def test_a_second_node_on_the_folder_is_refused_and_the_first_goes_on(node: RunningNode) -> None:
    with running_node("32MiB", start=False) as second:
        second.folder = node.folder
        assert second.launch().wait(30) == 1
        line = second.log.strip().splitlines()[-1]
        assert f"another node (pid {node.pid}) is serving {node.folder}" in line
        assert "choose another --dir" in line
        with node.connect() as client:
            fill(client, "a")


def test_stale_files_of_a_dead_node_are_taken_over(node: RunningNode) -> None:
    with node.connect() as client:
        fill(client, "a")
    node.kill()
    assert (node.folder / "node.sock").exists()
    (node.folder / "table.part").write_bytes(b"left by a node that died while it started")
    (node.folder / "spaces").write_bytes(b"likewise")
    (node.folder / "sessions" / "rubbish").write_bytes(b"")
    (node.folder / "sessions" / "77").write_bytes(b"short")
    (node.folder / "lock").write_text("999999")
    node.start()
    with node.connect() as client:
        assert generation_of("a", client.get("a")) == 1
        eventually(lambda: client.stats().sessions_silent == 0)
    assert not (node.folder / "table.part").exists()


@pytest.mark.parametrize("what", ["a link", "a file"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, what: str) -> None:
    with running_node("16MiB", start=False) as node:
        if what == "a link":
            node.folder.symlink_to(tmp_path)
        else:
            node.folder.write_text("a file")
        assert node.launch().wait(30) == 1
        assert "is not a folder" in node.log
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["pool", "records", "table", "table.part", "spaces", "lock", "node.sock"])
def test_a_link_laid_in_the_folder_is_never_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    with running_node("16MiB", start=False) as node:
        node.folder.mkdir(0o700)
        (node.folder / name).symlink_to(target)
        process = node.launch()
        eventually(lambda: (node.folder / "node.sock").is_socket() or process.poll() is not None)
        assert target.read_text() == "precious"


# ---- a file system that is full --------------------------------------------------------------------------------------


@pytest.fixture
def small_filesystem() -> Iterator[Path]:
    """A tmpfs of 96 MiB, mounted for the test."""
    folder = Path(tempfile.mkdtemp(prefix="moonpool-full-", dir="/dev/shm"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("this sandbox doesn't allow a mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def test_a_pool_that_does_not_fit_is_refused_with_what_is_free(small_filesystem: Path) -> None:
    with running_node("200MiB", start=False, parent=small_filesystem) as node:
        assert node.launch().wait(30) == 1
        line = node.log.strip().splitlines()[-1]
        assert "MiB" in line
        assert "free" in line
        assert not (node.folder / "pool").exists() or (node.folder / "pool").stat().st_blocks == 0


def test_a_larger_pool_than_before_is_refused_too(small_filesystem: Path) -> None:
    with running_node("32MiB", parent=small_filesystem) as node:
        with node.connect() as client:
            fill(client, "a")
        node.stop()
        node.options["pool"] = "200MiB"
        assert node.launch().wait(30) == 1
        node.options["pool"] = "32MiB"
        node.start()
        with node.connect() as client:
            assert client.exists("a"), "the refusal has cost nothing"


def test_a_file_system_that_fills_up_while_serving_kills_nobody(small_filesystem: Path) -> None:
    with running_node("32MiB", parent=small_filesystem) as node, node.connect(timeout_s=30) as client:
        eventually(lambda: client.stats().reserved_bytes == 32 * MIB)
        fill(client, "before")
        filler = small_filesystem / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (MIB, 4096):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        # What was reserved works on; what needs new memory says so.
        for i in range(40):
            fill(client, f"key {i}")
        assert generation_of("key 39", client.get("key 39")) == 1
        long = "k" * 200
        statuses = client.put_many([f"{long} {i}" for i in range(600)], [b"value"] * 600)
        assert set(statuses) <= {Status.OK, Status.NO_SPACE}
        before = client.stats().sessions
        for _ in range(3):
            with pytest.raises(moonpool.NodeUnavailable, match="space"):
                node.connect()
        eventually(lambda: client.stats().sessions == before, "a session that could not begin leaves nothing")
        client.declare(a_space("x" * 15_000))  # its memory was set aside at the start
        filler.unlink()
        node.connect().close()
        assert "Traceback" not in node.log, node.log


def _try_connect(node: RunningNode) -> moonpool.Client | None:
    try:
        return node.connect()
    except moonpool.NodeUnavailable:
        return None


# ---- limits of the process -------------------------------------------------------------------------------------------


def test_a_node_out_of_file_descriptors_serves_those_it_has(node: RunningNode) -> None:
    with node.connect(timeout_s=30) as client:
        subprocess.run(["prlimit", "--pid", str(node.pid), "--nofile=60:60"], check=True)
        refused = 0
        others = []
        for _ in range(40):
            try:
                others.append(node.connect(timeout_s=0.5, prefault=False))
            except moonpool.NodeUnavailable:
                refused += 1
                if refused > 2:
                    break
        assert refused, "the limit was reached"
        fill(client, "a")
        before = _cpu_ticks(node.pid)
        subprocess.run(["sleep", "0.5"], check=True)
        assert _cpu_ticks(node.pid) - before < 25, "it does not spin on what it can't accept"
        for other in others:
            other.close()
        eventually(lambda: _try_connect(node) is not None)


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_checksum_process_is_started_again_when_it_dies(node: RunningNode) -> None:
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    with node.connect(timeout_s=30) as client:
        fill(client, "a")
        (first,) = map(int, children.read_text().split())
        os.kill(first, 9)
        # It runs when nothing else does, so on a busy machine dying takes it seconds too.
        eventually(lambda: children.read_text().split() not in ([], [str(first)]), within_s=60)

        def verified() -> bool:
            try:
                return generation_of("a", client.get("a", verify=True)) == 1
            except moonpool.IntegrityError:  # not in time: the new process is still starting
                return False

        eventually(verified, within_s=60)


def test_a_killed_node_leaves_no_process_behind(node: RunningNode) -> None:
    children = [int(pid) for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]
    assert children
    node.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_a_client_killed_while_it_connects_leaves_no_session(node: RunningNode) -> None:
    code = """
import sys, moonpool
print("go", flush=True)
clients = []
while True:
    clients.append(moonpool.connect(sys.argv[1], prefault=False))
"""
    with node.connect() as client:
        for _ in range(5):
            with ended(python(code, node.url)) as process:
                assert said(process) == "go"
                eventually(lambda: client.stats().sessions > 3)
                kill(process)
        eventually(lambda: client.stats().sessions == 1)
        assert len(list((node.folder / "sessions").iterdir())) == 1
