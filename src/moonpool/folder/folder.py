"""The folder: where it lies, that it is safe to use, and what its files are called."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from moonpool.errors import FolderError

_SOCKET_NAME_BYTES_MAX = 107  # sockaddr_un.sun_path, less its terminating zero


def default_folder() -> Path:
    """The user's own folder under /dev/shm. Pure; creates nothing."""
    return Path("/dev/shm") / f"moonpool-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths in one folder. Holding it reserves nothing."""

    path: Path

    @property
    def pool(self) -> Path:
        return self.path / "pool"

    @property
    def table(self) -> Path:
        return self.path / "table"

    @property
    def records(self) -> Path:
        return self.path / "records"

    @property
    def socket(self) -> Path:
        return self.path / "node.sock"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def spaces(self) -> Path:
        return self.path / "spaces"

    @property
    def sessions(self) -> Path:
        return self.path / "sessions"

    def session(self, session_id: int) -> Path:
        return self.sessions / f"{session_id}"

    def create(self, mode: int = 0o700, group: int | None = None) -> None:
        """Make the folder, or check an existing one: a real folder of this user's, no wider than `mode`.

        Raises `FolderError` where somebody else owns it, it is a link, or others could write to it.
        """
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            found = os.lstat(self.path)
            if not stat.S_ISDIR(found.st_mode):
                raise FolderError(f"{self.path} is not a folder; remove it or choose another --dir") from None
            if found.st_uid != os.geteuid():
                raise FolderError(
                    f"{self.path} belongs to uid {found.st_uid}, not to this user ({os.geteuid()}); "
                    "choose another --dir"
                ) from None
        except OSError as error:
            raise FolderError(f"{self.path} can't be made: {error.strerror}") from error
        if group is not None:
            os.chown(self.path, -1, group)
        os.chmod(self.path, mode)
        if len(os.fsencode(self.socket)) > _SOCKET_NAME_BYTES_MAX:
            raise FolderError(
                f"{self.socket} is longer than the {_SOCKET_NAME_BYTES_MAX} bytes that a Unix socket's name may "
                "have; choose a shorter --dir"
            )
        self.sessions.mkdir(exist_ok=True)
        if group is not None:
            os.chown(self.sessions, -1, group)
        os.chmod(self.sessions, 0o750 if mode & 0o070 else 0o700)

    def forget(self) -> None:
        """Remove what an earlier pool left: records, key spaces, session files. Mappings of its pool stay valid."""
        for path in (self.records, self.spaces, *self.sessions.iterdir()):
            path.unlink(missing_ok=True)

    @staticmethod
    def file_mode(mode: int) -> int:
        """The mode of the files that clients use, for a folder of this mode: whoever may enter may read and write."""
        return 0o660 if mode & 0o070 else 0o600

    def check(self, *, own: bool) -> None:
        """Client side: refuse a folder that strangers may have made or written to. Changes nothing.

        `own`: it must be this user's, as the default folder must, whose name anybody can guess and take first.
        Another one is trusted as its name was given, unless everybody may write to it. Raises `FolderError`.
        """
        try:
            found = os.lstat(self.path)
        except OSError as error:
            raise FolderError(f"there is no node's folder at {self.path} ({error.strerror})") from error
        if not stat.S_ISDIR(found.st_mode):
            raise FolderError(f"{self.path} is not a folder")
        if found.st_mode & 0o002:
            raise FolderError(f"{self.path} is writable by everybody: what lies in it can't be trusted")
        if own and found.st_uid != os.geteuid():
            raise FolderError(f"{self.path} belongs to uid {found.st_uid}, not to this user ({os.geteuid()})")

    def take_lock(self) -> int:
        """Take the node's lock and return its file descriptor, to be kept open while the node lives.

        The lock goes with the process, so a dead node's needs no clearing. Raises `FolderError` while
        another node holds it.
        """
        fd = open_file(self.lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise FolderError(
                f"another node (pid {owner or 'unknown'}) is serving {self.path}; stop it or choose another --dir"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open one of the folder's files: never through a link, never inherited by a started program."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        raise FolderError(f"{path} can't be opened: {error.strerror}") from error
