"""How much memory a pool may take on this machine: what is free, and what bounds it.

A pool is memory that the system can't take back, so its size is settled before anything is allocated. Three things
bound it: the free space of the folder's file system, the memory limits of the control groups (version 1 and 2, every
level above the process), and the memory that the kernel calls available.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moonpool.errors import ConfigError
from moonpool.folder.folder import Folder
from moonpool.sizes import format_bytes

DEFAULT_SHARE = 0.5
"""Of what is free, the share that a pool takes unless told otherwise: the engines beside it need host memory for
weights and staging, and the other half keeps the system away from reclaiming under them."""

POOL_BYTES_MIN = 1 << 20
"""Less than this holds no KV block worth the name; a smaller figure is a slip in the unit."""

PAGE_BYTES = 4096
_DEFAULT_STEP_BYTES = 2 << 20  # a computed size is whole huge pages
_UNLIMITED_BYTES = 1 << 60  # control groups of version 1 write "no limit" as a number near 2**63
# Per version of control groups: the files with limits, the one with the usage, the line of memory.stat to leave out.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool's size, what bounded it in words, and how many bytes that left free."""

    bytes: int
    bound_by: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures are read: handed in, so that tests can describe a machine."""

    read_text: Callable[[str], str | None]
    """The text of a file, or None where it can't be read."""
    free_bytes: Callable[[Path], int]
    """Bytes that this user may still write to the file system that holds a path."""


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


HOST = Machine(read_text=_read_text, free_bytes=_free_bytes)


def default_pool_bytes(folder: Path, machine: Machine = HOST) -> PoolSize:
    """The size of a pool that nobody gave a size: half of the smallest free figure, in whole huge pages.

    A pool that lies in `folder` already keeps its size, whatever is free now: its objects are worth more than a
    better fit. Changes nothing. Raises `ConfigError` where even the smallest pool wouldn't fit.
    """
    kept, _ = existing_pool(folder)
    if kept >= POOL_BYTES_MIN:
        return PoolSize(kept, "the size of the pool that is there already", kept)
    free, bound_by = _tightest(folder, machine)
    size = int(free * DEFAULT_SHARE) // _DEFAULT_STEP_BYTES * _DEFAULT_STEP_BYTES
    if size < POOL_BYTES_MIN:
        raise ConfigError(
            f"option 'pool': {bound_by} leaves {_text(free)} free, too little for a pool; free some memory or choose "
            "another --dir"
        )
    return PoolSize(size, bound_by, free)


def check_fits(pool_bytes: int, folder: Path, machine: Machine = HOST) -> None:
    """Refuse a pool that this machine has no room for. Allocates and changes nothing.

    What a pool that lies in `folder` already has been given counts as free: it is taken over, or replaced. Raises
    `ConfigError` with the figure that is free and what bounds it.
    """
    _, owned_bytes = existing_pool(folder)
    free, bound_by = _tightest(folder, machine)
    free += owned_bytes
    if pool_bytes > free:
        raise ConfigError(
            f"option 'pool': {_text(pool_bytes)} doesn't fit, {bound_by} leaves {_text(free)} free; give a smaller "
            f"--pool or leave it out for {_text(int(free * DEFAULT_SHARE))}"
        )


def existing_pool(folder: Path) -> tuple[int, int]:
    """The size of the pool file that lies in `folder`, and how much memory it has been given; 0 and 0 without one."""
    try:
        found = os.lstat(Folder(folder).pool)
    except OSError:
        return 0, 0
    return found.st_size, found.st_blocks * 512


def _tightest(folder: Path, machine: Machine) -> tuple[int, str]:
    return min(_free_figures(folder, machine), key=lambda figure: figure[0])


def _free_figures(folder: Path, machine: Machine) -> Iterator[tuple[int, str]]:
    """Every figure that bounds a pool, never negative, each with its name."""
    place = _nearest_existing(folder)
    yield max(0, machine.free_bytes(place)), f"the file system of {place}"
    for group, free in _group_headrooms(machine):
        yield max(0, free), f"the memory limit of control group {group}"
    for line in (machine.read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024, "the machine's available memory"


def _group_headrooms(machine: Machine) -> Iterator[tuple[str, int]]:
    """Limit less usage of every control group from the process's own up to the root, where there is a limit."""
    for version, mount, root, group in _memory_groups(machine):
        # In a container the mount may show only a part of the tree, named by its root.
        inside = PurePosixPath(group)
        if inside.is_relative_to(root):
            inside = PurePosixPath("/") / inside.relative_to(root)
        for level in (inside, *inside.parents):
            folder = f"{mount}{level}".rstrip("/")
            limit, usage = _limit_and_usage(machine, folder, version)
            if limit is not None:
                yield str(level), limit - usage


def _limit_and_usage(machine: Machine, folder: str, version: int) -> tuple[int | None, int]:
    """The limit in bytes (None = none) and what counts against it, less what the kernel would drop first."""
    limits, usage_name, inactive_name = _FILES[version]
    found = [int(text) for name in limits if (text := machine.read_text(f"{folder}/{name}") or "").strip().isdigit()]
    limit = min((value for value in found if value < _UNLIMITED_BYTES), default=None)
    if limit is None:
        return None, 0
    usage = int(machine.read_text(f"{folder}/{usage_name}") or 0)
    for line in (machine.read_text(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == inactive_name:
            usage -= int(value)
    return limit, max(0, usage)


def _memory_groups(machine: Machine) -> Iterator[tuple[int, str, str, str]]:
    """(version, mount point, the part of the tree that is mounted there, the process's group) where memory counts."""
    mounts: dict[int, tuple[str, str]] = {}
    for line in (machine.read_text("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, *others = rest.split()
        root, mount = fields.split()[3:5]
        if kind == "cgroup2":
            mounts.setdefault(2, (mount, root))
        elif kind == "cgroup" and "memory" in others[-1].split(","):
            mounts.setdefault(1, (mount, root))
    for line in (machine.read_text("/proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2 if hierarchy == "0" else 0
        if version in mounts:
            yield version, *mounts[version], group


def _nearest_existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))


def _text(count: int) -> str:
    return format_bytes(count, binary=True)
