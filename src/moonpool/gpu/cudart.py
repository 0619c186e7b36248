"""The few calls of the CUDA runtime that torch doesn't offer, or not cheaply enough, through ctypes."""

from __future__ import annotations

import ctypes
import glob
import re
import sys
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, Protocol

from moonpool.errors import MoonpoolError

NOT_READY = 600
"""What `cudaEventQuery` answers while the event hasn't been reached."""
MEMCPY_DEFAULT = 4  # the direction follows from the addresses
EVENT_DISABLE_TIMING = 2
STREAM_NON_BLOCKING = 1
REGISTER_PORTABLE, REGISTER_READ_ONLY = 1, 8
CAPTURE_RELAXED = 2


class CudaError(MoonpoolError):
    """A call of the CUDA runtime failed: its name, code and CUDA's own words."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} (CUDA error {code})")
        self.code = code


class Cuda(Protocol):
    """What the device's mover and the registration need of CUDA. Streams and events are handles, addresses integers.
    All but `event_query` raise `CudaError`."""

    def enter_thread(self, device: int) -> None:
        """Make the calling thread one of this device's, whose calls don't disturb a graph that another captures."""

    def stream(self, *, urgent: bool) -> int: ...
    def event(self) -> int: ...
    def record(self, event: int, stream: int) -> None: ...
    def stream_wait(self, stream: int, event: int) -> None: ...
    def event_query(self, event: int) -> bool:
        """Whether what was recorded has been reached. An error counts as a `CudaError` like everywhere."""

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        """Queue a copy and return. The interpreter lock is held."""

    def copy_pageable(self, target: int, source: int, length: int, stream: int) -> None:
        """The same where one side isn't registered: it may take as long as the copy, without the lock."""

    def register(self, address: int, length: int, flags: int) -> None: ...
    def unregister(self, address: int) -> None: ...
    def destroy_event(self, event: int) -> None: ...
    def destroy_stream(self, stream: int) -> None: ...


class Runtime:
    """libcudart itself.

    Calls that only queue something take under 2 µs and keep the interpreter lock: giving it up and waiting for it
    again could cost 5 ms each where another thread computes. Those that can take long let go of it.
    """

    def __init__(self, library: str | None = None) -> None:
        path = library or find_library()
        self._quick, self._long = ctypes.PyDLL(path), ctypes.CDLL(path)
        quick, long = self._quick, self._long
        self._record = _declare(quick, "cudaEventRecord", c_void_p, c_void_p)
        self._query = _declare(quick, "cudaEventQuery", c_void_p)
        self._wait = _declare(quick, "cudaStreamWaitEvent", c_void_p, c_void_p, c_uint)
        self._copy = _declare(quick, "cudaMemcpyAsync", c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self._copy_long = _declare(long, "cudaMemcpyAsync", c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self._event = _declare(quick, "cudaEventCreateWithFlags", c_void_p, c_uint)
        self._stream = _declare(long, "cudaStreamCreateWithPriority", c_void_p, c_uint, c_int)
        self._priorities = _declare(quick, "cudaDeviceGetStreamPriorityRange", c_void_p, c_void_p)
        self._register = _declare(long, "cudaHostRegister", c_void_p, c_size_t, c_uint)
        self._unregister = _declare(long, "cudaHostUnregister", c_void_p)
        self._destroy_event = _declare(long, "cudaEventDestroy", c_void_p)
        self._destroy_stream = _declare(long, "cudaStreamDestroy", c_void_p)
        self._set_device = _declare(long, "cudaSetDevice", c_int)
        self._exchange = _declare(quick, "cudaThreadExchangeStreamCaptureMode", c_void_p)
        self._last_error = _declare(quick, "cudaGetLastError")
        self._text = quick.cudaGetErrorString
        self._text.argtypes, self._text.restype = (c_int,), c_char_p

    def enter_thread(self, device: int) -> None:
        self._check("cudaSetDevice", self._set_device(device))
        mode = c_int(CAPTURE_RELAXED)
        self._check("cudaThreadExchangeStreamCaptureMode", self._exchange(ctypes.byref(mode)))

    def stream(self, *, urgent: bool) -> int:
        least, greatest, handle = c_int(), c_int(), c_void_p()
        answer = self._priorities(ctypes.byref(least), ctypes.byref(greatest))
        self._check("cudaDeviceGetStreamPriorityRange", answer)
        priority = greatest.value if urgent else least.value
        answer = self._stream(ctypes.byref(handle), STREAM_NON_BLOCKING, priority)
        self._check("cudaStreamCreateWithPriority", answer)
        return handle.value or 0

    def event(self) -> int:
        handle = c_void_p()
        self._check("cudaEventCreateWithFlags", self._event(ctypes.byref(handle), EVENT_DISABLE_TIMING))
        return handle.value or 0

    def record(self, event: int, stream: int) -> None:
        if code := self._record(event, stream):
            self._check("cudaEventRecord", code)

    def stream_wait(self, stream: int, event: int) -> None:
        if code := self._wait(stream, event, 0):
            self._check("cudaStreamWaitEvent", code)

    def event_query(self, event: int) -> bool:
        code = self._query(event)
        if code == 0:
            return True
        if code == NOT_READY:
            self._last_error()  # else torch may find it after its next launch and take it for that one's
            return False
        self._check("cudaEventQuery", code)
        return False

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        if code := self._copy(target, source, length, MEMCPY_DEFAULT, stream):
            self._check("cudaMemcpyAsync", code)

    def copy_pageable(self, target: int, source: int, length: int, stream: int) -> None:
        self._check("cudaMemcpyAsync", self._copy_long(target, source, length, MEMCPY_DEFAULT, stream))

    def register(self, address: int, length: int, flags: int) -> None:
        self._check("cudaHostRegister", self._register(address, length, flags))

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._unregister(address))

    def destroy_event(self, event: int) -> None:
        self._check("cudaEventDestroy", self._destroy_event(event))

    def destroy_stream(self, stream: int) -> None:
        self._check("cudaStreamDestroy", self._destroy_stream(stream))

    def _check(self, call: str, code: int) -> None:
        """Raises `CudaError`, having cleared the thread's last error: it is ours, and not to be found by torch."""
        if code:
            self._last_error()
            raise CudaError(call, code, str(self._text(code).decode()))


def _declare(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, c_int
    return function


def find_library() -> str:
    """The libcudart that this process has loaded already, as torch does; else one that can be found.

    Two of different versions in one process would work on the same device, but with two sets of errors and streams.
    Raises `MoonpoolError` where there is none.
    """
    mapped = re.findall(r"(/\S*libcudart\S*\.so[.\d]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    beside = [path for folder in sys.path for path in sorted(glob.glob(f"{folder}/nvidia/*/lib/libcudart.so.*"))]
    for name in (*dict.fromkeys(mapped), *beside, "libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return str(name)
    raise MoonpoolError("libcudart isn't found: install a torch that is built for CUDA")
