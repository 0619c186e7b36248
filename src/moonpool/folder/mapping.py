"""Shared memory: a file mapped, reserved, touched and prefaulted without holding the interpreter lock."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from moonpool.errors import FolderError
from moonpool.folder.folder import open_file

MADV_POPULATE_READ = 22  # Linux 5.14
MADV_POPULATE_WRITE = 23
TOUCH_CHUNK_BYTES = 32 << 20  # one step of touching: 10 to 20 ms, after which a stop is noticed

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """One shared mapping of a file, or anonymous memory.

    Owns the mapping, not the file descriptor, which is closed at once. `bytes` and every array made from it stay
    valid for as long as they are referenced, also after the file has been unlinked: the memory is unmapped when
    the last of them is gone. There is no close: a mapping under somebody's view must not go away.
    """

    def __init__(self, memory: mmap.mmap, *, writable: bool) -> None:
        self.memory = memory
        self.writable = writable
        self.size = len(memory)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.view = memoryview(memory)

    @classmethod
    def anonymous(cls, size: int) -> Mapping:
        """Private memory of this process, zeroed, taken from the system page by page as it is touched."""
        return cls(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), writable=True)

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> Mapping:
        """Map an existing file. Raises `FolderError` where it can't be opened or is empty."""
        fd = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size == 0:
                raise FolderError(f"{path} is empty: its node is still starting, or the file was truncated")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return cls(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection), writable=writable)
        except (OSError, ValueError) as error:
            raise FolderError(f"{path} can't be mapped: {error}") from error
        finally:
            os.close(fd)

    def touch(self, start: int, length: int) -> bool:
        """Fault pages in without changing a byte; the interpreter lock is not held.

        True on success; False where the kernel is too old (pages then come in as they are used) or has no memory.
        """
        address = self.bytes.ctypes.data + start
        advice = MADV_POPULATE_WRITE if self.writable else MADV_POPULATE_READ
        return int(_libc.madvise(address, length, advice)) == 0

    def array(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes at `offset` as a new array that owns a reference to the mapping (no copy)."""
        return np.frombuffer(self.memory, np.uint8, size, offset)


def reserve_file(fd: int, start: int, length: int, path: Path) -> None:
    """Have the system set memory aside for part of a file, so that touching it can't fail later.

    Lets go of the interpreter lock. Raises `FolderError` with the figure that is free when there is too little.
    """
    try:
        os.posix_fallocate(fd, start, length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise FolderError(f"{path} can't be extended: {error.strerror}") from error
        found = os.fstatvfs(fd)
        free = found.f_bavail * found.f_frsize
        raise FolderError(
            f"{path}: {length} bytes can't be reserved, {free} bytes are free on its file system; "
            "free some or use a smaller --pool"
        ) from error


def create_file(path: Path, size: int, mode: int, group: int | None = None) -> int:
    """Make a file afresh (an older one is unlinked, not truncated: others may have it mapped) and open it.

    The caller owns the file descriptor that is returned.
    """
    path.unlink(missing_ok=True)
    fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    if group is not None:
        os.fchown(fd, -1, group)
    os.fchmod(fd, mode)
    os.ftruncate(fd, size)
    return fd


@overload
def column(kind: Literal["b", "B", "i"], count: int) -> memoryview[int]: ...
@overload
def column(kind: Literal["d"], count: int) -> memoryview[float]: ...
def column(kind: Literal["b", "B", "i", "d"], count: int) -> memoryview[int] | memoryview[float]:
    """A fixed column of `count` zeros of struct format `kind`, resident only where it was written: private memory, as
    reading a page of a shared mapping makes it resident too."""
    width = np.dtype(kind).itemsize
    memory = mmap.mmap(-1, max(1, count) * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast(kind)
