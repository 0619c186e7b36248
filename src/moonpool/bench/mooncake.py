"""Mooncake's store beside ours, as it runs on one host: its master, a process that provides memory, one that reads.

It is driven by an interpreter of its own, since its package has dependencies that ours must not have.
"""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

from moonpool.bench import mooncake_peer
from moonpool.bench.local import Progress, Scale
from moonpool.bench.node import free_port
from moonpool.errors import MoonpoolError

OBJECTS = 100_000
"""Objects in its table for `exists`: it takes minutes for a million, and a lookup in its hash map is no slower then."""
SEGMENT_BYTES = 4 << 30
MASTER_START_S = 2.0


def measure(python: Path, scale: Scale, progress: Progress) -> dict[str, Any]:
    """Run it and return its figures under our names. Raises `MoonpoolError` where it doesn't run."""
    quick = scale.objects < OBJECTS
    plan = {
        "sizes": scale.sizes,
        "total_bytes": scale.plan.total_bytes,
        "passes": 2,
        "objects": scale.objects if quick else OBJECTS,
        "lookups": scale.lookups,
        "small": 640 if quick else 20_000,
        "segment_bytes": SEGMENT_BYTES // 4 if quick else SEGMENT_BYTES,
    }
    script, port = mooncake_peer.__file__, free_port()
    with progress("Mooncake beside it", None), ExitStack() as stack:
        master = [str(python.parent / "mooncake_master"), f"-port={port}", f"-metrics_port={free_port()}"]
        _start(stack, master, output=subprocess.DEVNULL)
        time.sleep(MASTER_START_S)
        # Isolated: the folder of the script has a module of their package's name.
        command, rest = [str(python), "-I", script], [str(port), json.dumps(plan)]
        _ready(_start(stack, [*command, "provide", *rest]))
        result: dict[str, Any] = json.loads(_ready(_start(stack, [*command, "measure", *rest])))
        return result


def _start(stack: ExitStack, command: list[str], output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a process that ends with `stack`. It logs much to standard error, which nobody wants."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        raise MoonpoolError(f"--peer mooncake: {command[0]} can't be started: {error.strerror}") from error

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    return process


def _ready(process: subprocess.Popen[str]) -> str:
    """The peer's next line."""
    line = cast("IO[str]", process.stdout).readline()
    if not line:
        raise MoonpoolError("--peer mooncake: it ended early; try the interpreter with `import mooncake.store`")
    return line
