"""The copy for large pieces: past the caches, through a library in C, or numpy's where there is none.

`choose` takes one of the twins, `NativeCopy` or `NumpyCopy`; `MOONPOOL_COPY` (auto, native or numpy) tells it which.
What the native one is for: memory that nobody has used for long, in both directions between heap and pool, is copied
a third faster, and a round trip afterwards finds client's and node's caches as they were (see streaming.c).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

VARIABLE = "MOONPOOL_COPY"
LIBRARY = Path(__file__).with_name("_streaming.so")
"""Made at install, by hatch_build.py."""
_start_of = (ctypes.c_char * 0).from_buffer


class Copy(Protocol):
    """Copies `source` into `target`, whose memory is the caller's, without the interpreter lock.

    Raises `ValueError`, and has written nothing, where lengths differ, one isn't contiguous, the target is read-only,
    or they share memory.
    """

    name: str

    def __call__(self, target: Bytes, source: Bytes) -> None: ...


class NumpyCopy:
    """The twin in plain Python: `numpy.copyto`."""

    name = "numpy"

    def __call__(self, target: Bytes, source: Bytes) -> None:
        _check(target, source)
        np.copyto(target, source)


class NativeCopy:
    """The twin in C. Raises `OSError` where `library` can't be loaded, `AttributeError` where it is another one."""

    name = "native"

    def __init__(self, library: Path = LIBRARY) -> None:
        self._copy = ctypes.CDLL(str(library)).moonpool_copy
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._copy.restype = None

    def __call__(self, target: Bytes, source: Bytes) -> None:
        _check(target, source)
        # `ctypes.data` would do for the target too, at 0.5 us more; a read-only source has no other way.
        self._copy(ctypes.byref(_start_of(target.data)), source.ctypes.data, target.nbytes)


def _check(target: Bytes, source: Bytes) -> None:
    """What keeps the native copy within the two arrays: an error rather than an assertion, which may be off."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"a target of {target.nbytes} bytes for a source of {source.nbytes}")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("only contiguous arrays are copied")
    if not target.flags.writeable:
        raise ValueError("the target is read-only")
    if np.may_share_memory(target, source):
        raise ValueError("target and source share memory")


@dataclass(frozen=True, slots=True)
class Choice:
    """The copy that was chosen, and why it and not the other."""

    copy: Copy
    reason: str

    def __str__(self) -> str:
        return f"{self.copy.name}: {self.reason}"


def choose(wanted: str | None = None, library: Path = LIBRARY) -> Choice:
    """Choose a copy as `wanted`: "native", "numpy", or "auto" for native where it can be had. None = `MOONPOOL_COPY`,
    which is "auto" where it isn't set.

    Raises `ConfigError` where `wanted` is none of these, or native and not to be had.
    """
    wanted = (wanted or os.environ.get(VARIABLE) or "auto").lower()
    if wanted == "numpy":
        return Choice(NumpyCopy(), f"{VARIABLE}=numpy")
    if wanted not in ("auto", "native"):
        raise ConfigError(f"{VARIABLE}={wanted!r} is none of auto, native and numpy")
    try:
        return Choice(NativeCopy(library), f"{library.name} is there")
    except (OSError, AttributeError) as error:
        why = f"{library.name} can't be loaded: {error}" if library.exists() else f"{library} isn't there"
    if wanted == "native":
        raise ConfigError(
            f"{VARIABLE}=native, but {why}; install Moonpool again with a C compiler (x86-64), or set {VARIABLE}=auto"
        )
    return Choice(NumpyCopy(), why)
