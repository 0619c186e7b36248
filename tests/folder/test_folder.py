"""The folder and its mappings: modes, owners, links, locks, memory that stays under arrays."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from moonpool.errors import FolderError
from moonpool.folder.folder import Folder, open_file
from moonpool.folder.mapping import Mapping, create_file, reserve_file


def test_it_is_made_private_and_narrowed_to_what_is_asked(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "node")
    folder.create()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.path.chmod(0o777)
    folder.create(0o770)
    assert folder.path.stat().st_mode & 0o777 == 0o770
    assert folder.sessions.stat().st_mode & 0o777 == 0o750


def test_a_link_or_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(FolderError, match="not a folder"):
            Folder(tmp_path / name).create()
        with pytest.raises(FolderError, match="not a folder"):
            Folder(tmp_path / name).check(own=False)
    with pytest.raises(FolderError, match="can't be made"):
        Folder(tmp_path / "none" / "such").create()
    with pytest.raises(FolderError, match="no node's folder"):
        Folder(tmp_path / "none").check(own=False)


def test_a_name_too_long_for_a_socket_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="107"):
        Folder(tmp_path / ("n" * 110)).create()


def test_files_are_never_opened_through_a_link_nor_inherited(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("")
    with pytest.raises(FolderError):
        open_file(tmp_path / "link", os.O_RDWR)
    fd = open_file(tmp_path / "target", os.O_RDWR)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_the_lock_is_one_nodes_at_a_time(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "node")
    folder.create()
    first = folder.take_lock()
    with pytest.raises(FolderError, match=f"pid {os.getpid()}"):
        folder.take_lock()
    os.close(first)
    os.close(folder.take_lock())


def test_a_mapping_outlives_its_file_for_as_long_as_an_array_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.close(create_file(path, 8192, 0o600))
    mapping = Mapping.open(path, writable=True)
    array = mapping.array(4096, 10)
    array[:] = 7
    other = Mapping.open(path, writable=False)
    path.unlink()
    with pytest.raises(ValueError):
        other.bytes[0] = 1
    del mapping
    assert array.tolist() == [7] * 10
    assert other.bytes[4096:4106].tolist() == [7] * 10


def test_a_file_made_afresh_leaves_an_older_mapping_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.close(create_file(path, 4096, 0o600))
    older = Mapping.open(path, writable=True)
    older.bytes[:] = 5
    os.close(create_file(path, 4096, 0o600))
    assert Mapping.open(path, writable=True).bytes.max() == 0
    assert older.bytes.min() == 5


def test_what_cannot_be_mapped_or_reserved_says_why(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    with pytest.raises(FolderError, match="empty"):
        Mapping.open(path, writable=False)
    with pytest.raises(FolderError, match="can't be opened"):
        Mapping.open(tmp_path / "none", writable=False)
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(FolderError, match=r"can't be extended|bytes are free"):
        reserve_file(fd, 0, 1 << 50, path)
    os.close(fd)


def test_touching_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    mapping = Mapping.open(path, writable=True)
    mapping.touch(0, mapping.size)
    assert np.array_equal(mapping.bytes, np.frombuffer(bytes(range(256)) * 64, np.uint8))
