"""How large a pool may be on a machine that the test describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.capacity import HOST, Machine, check_fits, default_pool_bytes
from moonpool.errors import ConfigError

GIB = 1 << 30
NOWHERE = Path("/nowhere/pool")
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)


def machine(files: dict[str, str] | None = None, *, disk_gib: float = 100, available_gib: float = 100) -> Machine:
    texts = {"/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {int(available_gib * 1024**2)} kB\n", **(files or {})}
    return Machine(read_text=texts.get, free_bytes=lambda path: int(disk_gib * GIB))


def group(folder: str, *, limit: str, usage_gib: float, inactive_gib: float = 0, version: int = 2) -> dict[str, str]:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{int(usage_gib * GIB)}\n",
        f"{folder}/memory.stat": f"anon 1\n{names[2]} {int(inactive_gib * GIB)}\n",
    }


def test_the_file_system_bounds_when_it_is_the_smallest() -> None:
    size = default_pool_bytes(NOWHERE, machine(disk_gib=10))
    assert (size.bytes, size.bound_by, size.free_bytes) == (5 * GIB, "the file system of /", 10 * GIB)


def test_available_memory_bounds_when_it_is_the_smallest() -> None:
    size = default_pool_bytes(NOWHERE, machine(available_gib=8))
    assert (size.bytes, size.bound_by) == (4 * GIB, "the machine's available memory")


def test_a_limit_of_version_2_counts_less_what_is_used_and_can_not_be_dropped() -> None:
    files = {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": "0::/engines/seven\n"}
    files |= group("/sys/fs/cgroup/engines/seven", limit=str(20 * GIB), usage_gib=6, inactive_gib=2)
    size = default_pool_bytes(NOWHERE, machine(files))
    assert size.free_bytes == 16 * GIB
    assert size.bound_by == "the memory limit of control group /engines/seven"


def test_a_limit_further_up_bounds_as_well() -> None:
    files = {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": "0::/engines/seven\n"}
    files |= group("/sys/fs/cgroup/engines/seven", limit="max", usage_gib=1)
    files |= group("/sys/fs/cgroup/engines", limit=str(12 * GIB), usage_gib=4)
    size = default_pool_bytes(NOWHERE, machine(files))
    assert (size.free_bytes, size.bound_by) == (8 * GIB, "the memory limit of control group /engines")


def test_a_soft_limit_of_version_2_counts_too() -> None:
    files = {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": "0::/\n"}
    files |= group("/sys/fs/cgroup", limit="max", usage_gib=1) | {"/sys/fs/cgroup/memory.high": str(5 * GIB)}
    assert default_pool_bytes(NOWHERE, machine(files)).free_bytes == 4 * GIB


def test_a_limit_of_version_1_counts_and_its_huge_number_is_none() -> None:
    files = {"/proc/self/mountinfo": V1_MOUNT, "/proc/self/cgroup": "4:memory:/a/b\n3:cpuset:/a\n0::/\n"}
    unlimited = group("/sys/fs/cgroup/memory", limit="9223372036854771712", usage_gib=1, version=1)
    limited = group("/sys/fs/cgroup/memory/a", limit=str(10 * GIB), usage_gib=3, inactive_gib=1, version=1)
    size = default_pool_bytes(NOWHERE, machine(files | unlimited | limited))
    assert (size.free_bytes, size.bound_by) == (8 * GIB, "the memory limit of control group /a")
    assert default_pool_bytes(NOWHERE, machine(files | unlimited)).free_bytes == 100 * GIB


def test_in_a_container_the_mount_shows_only_its_own_part_of_the_tree() -> None:
    mount = "31 23 0:28 /pods/seven /sys/fs/cgroup ro,relatime - cgroup2 cgroup2 rw\n"
    files = {"/proc/self/mountinfo": mount, "/proc/self/cgroup": "0::/pods/seven\n"}
    files |= group("/sys/fs/cgroup", limit=str(6 * GIB), usage_gib=2)
    assert default_pool_bytes(NOWHERE, machine(files)).free_bytes == 4 * GIB


def test_usage_over_the_limit_leaves_nothing_and_is_refused() -> None:
    files = {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": "0::/\n"}
    files |= group("/sys/fs/cgroup", limit=str(GIB), usage_gib=2)
    with pytest.raises(ConfigError, match=r"control group / leaves 0 B free, too little"):
        default_pool_bytes(NOWHERE, machine(files))


def test_a_pool_that_does_not_fit_is_refused_with_the_figure_that_is_free() -> None:
    check_fits(8 * GIB, NOWHERE, machine(available_gib=8))
    with pytest.raises(
        ConfigError, match=r"8\.00 GiB doesn't fit, the machine's available memory leaves 7\.50 GiB free"
    ):
        check_fits(8 * GIB, NOWHERE, machine(available_gib=7.5))


def test_a_pool_that_is_there_already_keeps_its_size(tmp_path: Path) -> None:
    with (tmp_path / "pool").open("wb") as pool:
        pool.truncate(3 << 20)
    size = default_pool_bytes(tmp_path, machine(disk_gib=0))
    assert (size.bytes, size.bound_by) == (3 << 20, "the size of the pool that is there already")


def test_what_the_pool_that_is_there_has_been_given_counts_as_free(tmp_path: Path) -> None:
    with (tmp_path / "pool").open("wb") as pool:
        pool.write(bytes(2 << 20))
        pool.truncate(64 << 20)
    check_fits(3 << 20, tmp_path, machine(disk_gib=1 / 1024))
    with pytest.raises(ConfigError, match=r"4\.00 MiB doesn't fit, the file system of .* leaves 3\.00 MiB free"):
        check_fits(4 << 20, tmp_path, machine(disk_gib=1 / 1024))


def test_this_machine_has_figures(tmp_path: Path) -> None:
    size = default_pool_bytes(tmp_path, HOST)
    assert 0 < size.bytes <= size.free_bytes
