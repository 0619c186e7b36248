"""A node for the length of the demo: a daemon process of its own, over a folder that goes with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moonpool.testing.node import running_node


@contextmanager
def temporary_node(pool_bytes: int) -> Iterator[str]:
    """Run a node with a pool of `pool_bytes` and yield its URL. Afterwards it is stopped and its folder removed.

    Raises `MoonpoolError` with what it said where it can't start.
    """
    with running_node(str(pool_bytes), parent=_parent_folder(pool_bytes)) as node:
        yield node.url


def _parent_folder(pool_bytes: int) -> Path:
    """`/dev/shm` where the pool fits (in containers it often has 64 MB), else the usual place for temporary files."""
    shared = Path("/dev/shm")
    try:
        status = os.statvfs(shared)
    except OSError:
        return Path(tempfile.gettempdir())
    fits = os.access(shared, os.W_OK) and status.f_bavail * status.f_frsize > 2 * pool_bytes
    return shared if fits else Path(tempfile.gettempdir())
