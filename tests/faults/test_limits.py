"""What the system runs out of, or a client asks for without end, costs that client something and nobody else."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from moonpool.testing.node import eventually, running_node
from tests.faults.raw import Raw


def test_a_node_without_file_descriptors_left_idles_and_goes_on_when_there_are_some() -> None:
    with running_node("32MiB") as node, node.connect() as client:
        client.put("kept", b"value")
        _, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        assert resource.prlimit(node.pid, resource.RLIMIT_NOFILE)[0] == hard, "as many as it may have"
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (64, hard))
        crowd = [Raw(node.folder, hello=False) for _ in range(64)]
        before = _cpu_s(node.pid)
        begun = time.monotonic()
        time.sleep(1.0)
        assert _cpu_s(node.pid) - before < 0.5 * (time.monotonic() - begun), "it doesn't spin"
        assert client.get("kept") == b"value", "those who are there are served"
        for one in crowd:
            one.sock.close()
        eventually(lambda: _connects(node.folder), "others are let in again")
        assert node.log.count("no further client") == 1, node.log
        assert "Traceback" not in node.log, node.log


def _connects(folder: Path) -> bool:
    try:
        with Raw(folder):
            return True
    except (OSError, AssertionError):
        return False


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
