"""The copy for large pieces: the twins do the same, the chooser says what it tried, and the copier uses its choice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import moonpool
from moonpool.client.copying import PIECE_BYTES, SPREAD_BYTES_MIN, STREAMING_BYTES_MIN, Copier
from moonpool.client.streaming import LIBRARY, Bytes, Choice, Copy, NativeCopy, NumpyCopy, choose
from moonpool.errors import ConfigError
from tests.client.test_stall import STALL_S_MAX, TRIES, longest_stall, undisturbed

__all__ = ["undisturbed"]

ROOT = Path(__file__).parents[2]
LINE = 64
"""A cache line, which is what the native copy streams at a time."""
LENGTHS = (*range(LINE + 2), 127, 128, 129, 255, 1000, 4095, 4096, 4097)
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="installed without a C compiler")
needs_compiler = pytest.mark.skipif(not (LIBRARY.exists() and shutil.which("cc")), reason="there is no C compiler")


def native(folder: Path) -> Copy:
    return NativeCopy()


def native_sse2(folder: Path) -> Copy:
    from hatch_build import SOURCE, compile_library

    library = folder / "sse2.so"
    assert compile_library(ROOT / SOURCE, library, ["-DSSE2_ONLY"]) == ""
    return NativeCopy(library)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(lambda folder: NumpyCopy(), id="numpy"),
        pytest.param(native, id="native", marks=needs_library),
        pytest.param(native_sse2, id="native-sse2", marks=needs_compiler),
    ],
)
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    make: Callable[[Path], Copy] = request.param
    return make(tmp_path_factory.mktemp("library"))


def random_bytes(count: int) -> Bytes:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


# ---- what both twins do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source_start", [0, 1, 8, 31, 32, 63])
def test_every_alignment_and_odd_length_is_copied_and_nothing_beside_it(copy: Copy, source_start: int) -> None:
    room = max(LENGTHS) + 2 * LINE
    memory = random_bytes(room)
    for target_start in range(LINE):
        for length in LENGTHS:
            source = memory[source_start : source_start + length]
            found = np.zeros(room, np.uint8)
            copy(found[target_start : target_start + length], source)
            expected = np.zeros(room, np.uint8)
            expected[target_start : target_start + length] = source
            assert np.array_equal(found, expected), f"{length} bytes to offset {target_start}"


def test_a_long_copy_is_whole(copy: Copy) -> None:
    source = random_bytes((8 << 20) + 13)
    target = np.zeros_like(source)
    copy(target, source)
    assert np.array_equal(target, source)


def test_a_read_only_source_is_copied(copy: Copy) -> None:
    target = np.zeros(5, np.uint8)
    copy(target, np.frombuffer(b"bytes", np.uint8))
    assert target.tobytes() == b"bytes"


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda a: (a[:100], a[200:299]), "100 bytes for a source of 99"),
        (lambda a: (a[:100], a[200:201]), "100 bytes for a source of 1"),  # which numpy alone would repeat
        (lambda a: (a[:100], a[200:400:2]), "contiguous"),
        (lambda a: (a[0:200:2], a[200:300]), "contiguous"),
        (lambda a: (read_only(a[:100]), a[200:300]), "read-only"),
        (lambda a: (a[:100], a[99:199]), "share memory"),
        (lambda a: (a[1:101], a[:100]), "share memory"),
    ],
)
def test_what_cannot_be_copied_is_refused_and_nothing_is_written(
    copy: Copy, cut: Callable[[Bytes], tuple[Bytes, Bytes]], said: str
) -> None:
    memory = random_bytes(400)
    before = memory.copy()
    with pytest.raises(ValueError, match=said):
        copy(*cut(memory))
    assert np.array_equal(memory, before)


def test_neighbours_share_nothing(copy: Copy) -> None:
    memory = random_bytes(200)
    copy(memory[:100], memory[100:])
    assert np.array_equal(memory[:100], memory[100:])


def read_only(array: Bytes) -> Bytes:
    array.flags.writeable = False
    return array


@pytest.mark.slow
def test_other_threads_run_on_meanwhile(copy: Copy, undisturbed: None) -> None:
    # `test_stall` shows that the measurement notices a copy of half this size that holds the interpreter lock.
    source, target = np.ones(512 << 20, np.uint8), np.ones(512 << 20, np.uint8)
    stalls = []
    for _ in range(TRIES):
        stalls.append(longest_stall(lambda: copy(target, source)))
        if stalls[-1] <= STALL_S_MAX:
            return
    pytest.fail(f"stalls of {sorted(stalls)} s")


# ---- which one is chosen -------------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_COPY", raising=False)


@needs_library
def test_the_native_copy_is_chosen_where_it_is_there(unset: None) -> None:
    assert str(choose()) == "native: _streaming.so is there"
    assert choose("native").copy.name == "native"


def test_without_a_library_copies_go_through_numpy(unset: None, tmp_path: Path) -> None:
    choice = choose(library=tmp_path / "_streaming.so")
    assert (choice.copy.name, choice.reason) == ("numpy", f"{tmp_path}/_streaming.so isn't there")


def test_a_library_that_cannot_be_loaded_is_as_good_as_none(unset: None, tmp_path: Path) -> None:
    library = tmp_path / "_streaming.so"
    library.write_text("not a library")
    choice = choose(library=library)
    assert choice.copy.name == "numpy"
    assert choice.reason.startswith("_streaming.so can't be loaded: ")


def test_a_library_of_something_else_is_as_good_as_none(unset: None) -> None:
    choice = choose(library=Path(sys.modules["numpy._core._multiarray_umath"].__file__ or ""))
    assert choice.copy.name == "numpy"
    assert "moonpool_copy" in choice.reason


def test_native_that_is_asked_for_and_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MOONPOOL_COPY=native, but .*/_streaming.so isn't there; install Moonpool"):
        choose("native", tmp_path / "_streaming.so")


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_COPY", "numpy")
    assert choose().copy.name == "numpy"
    assert choose().reason == "MOONPOOL_COPY=numpy"
    monkeypatch.setenv("MOONPOOL_COPY", "memcpy")
    with pytest.raises(ConfigError, match="'memcpy' is none of auto, native and numpy"):
        moonpool.connect("embedded:4MiB")


# ---- where it is used ----------------------------------------------------------------------------------------------


class Recorder:
    """A copy that notes what it was asked for, and by which threads."""

    name = "recorder"

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.threads: set[str] = set()
        self.both = threading.Barrier(2)

    def __call__(self, target: Bytes, source: Bytes) -> None:
        self.lengths.append(len(target))
        if threading.current_thread().name not in self.threads:
            self.threads.add(threading.current_thread().name)
            self.both.wait(10)  # so that no thread does it all before the other has begun
        np.copyto(target, source)


def test_pieces_are_streamed_from_a_size_on_and_small_ones_are_not() -> None:
    copier, recorder = Copier(1), Recorder()
    recorder.threads.add(threading.current_thread().name)
    copier.streaming = Choice(recorder, "a test")
    sources = [random_bytes(count) for count in (STREAMING_BYTES_MIN - 1, STREAMING_BYTES_MIN, 9 << 20)]
    targets = [np.zeros_like(source) for source in sources]
    copier.copy(list(zip(targets, sources, strict=True)))
    assert recorder.lengths == [STREAMING_BYTES_MIN, 9 << 20]
    assert all(map(np.array_equal, targets, sources))


def test_helping_threads_stream_as_well() -> None:
    copier, recorder = Copier(2), Recorder()
    copier.streaming = Choice(recorder, "a test")
    source = random_bytes(max(SPREAD_BYTES_MIN, 4 * PIECE_BYTES) + 1)
    target = np.zeros_like(source)
    copier.copy([(target, source)])
    copier.close()
    assert recorder.threads == {threading.current_thread().name, "moonpool-copy"}
    assert recorder.lengths == [PIECE_BYTES] * 4
    assert np.array_equal(target, source)


# ---- how it is built -----------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a wheel is made from: a build changes the folder it works in."""
    folder = tmp_path / "sources"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", LIBRARY.name))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


def wheel_of(folder: Path, compiler: str) -> tuple[str, bool, str]:
    """The built wheel's tag, whether the library is in it, and what the build said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"],
        cwd=folder, env=os.environ | {"CC": compiler}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (wheel,) = (folder / "out").iterdir()
    inside = zipfile.ZipFile(wheel).namelist()
    return wheel.stem.split("-", 2)[2], f"moonpool/client/{LIBRARY.name}" in inside, done.stdout + done.stderr


@needs_compiler
def test_a_wheel_holds_the_library_and_says_for_which_machine(sources: Path) -> None:
    tag, has_library, _ = wheel_of(sources, "cc")
    assert (tag, has_library) == ("py3-none-linux_x86_64", True)


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc"])
def test_without_a_working_compiler_the_wheel_is_pure_and_one_line_says_so(sources: Path, compiler: str) -> None:
    (sources / "src/moonpool/client" / LIBRARY.name).write_text("an earlier build's")
    tag, has_library, said = wheel_of(sources, compiler)
    assert (tag, has_library) == ("py3-none-any", False)
    assert said.count("no streaming copy, copies go through numpy") == 1
