"""The mover for a KV cache on a CUDA device.

Objects travel between the pool and staging slots on the device in large copies by the copy engines, which leave the
multiprocessors to the model; a short kernel moves between a slot and the blocks. Blocks that are long enough are
copied directly. See docs/gpu.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

from moonpool.folder.mapping import Mapping
from moonpool.gpu.cudart import Cuda, CudaError
from moonpool.gpu.kernels import Ids, Kernels, choose
from moonpool.gpu.lane import Event, Lane, Memory, Pool
from moonpool.gpu.mover import MoverFailed, Region, Transfer
from moonpool.gpu.plan import check, is_direct
from moonpool.gpu.tickets import PAUSE_S, DeviceTicket, Events, Mark

log = logging.getLogger("moonpool.gpu")

STAGING_BYTES = 256 << 20
"""Of the device's memory, half for each direction: slots of 32 MiB."""
HELPER_PAUSE_S = 1e-3
"""How often the helper looks while something waits for room."""
CLOSE_S = 30.0
"""How long `close` waits for the device: everything in flight takes some 40 ms, without registration 1 s."""

_hung: list[DeviceMover] = []
"""Movers whose copies have never ended: what those write to is kept until the process ends."""


class Device(Memory, Protocol):
    """The device that a mover works on."""

    @property
    def index(self) -> int: ...
    def current_stream(self) -> int:
        """The stream that the engine submits to, in the calling thread."""

    def kernels(self) -> Kernels: ...
    def settle(self) -> None:
        """Wait until all that was submitted by now has ended: what was allocated may still be in use, what was
        uploaded be on its way."""


class TorchDevice:
    """A CUDA device by way of torch: its memory and its current stream."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.index = int(self._device.index)

    def device(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, device=self._device)

    def pinned(self, count: int) -> Ids:
        found: Ids = self._torch.empty(count, dtype=self._torch.int64, pin_memory=True).numpy()
        return found

    def current_stream(self) -> int:
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def settle(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def kernels(self) -> Kernels:
        with self._torch.cuda.device(self._device):
            found, said = choose(self._device, lambda table: self._torch.from_numpy(table).to(self._device))
        log.log(logging.INFO if found.name == "triton" else logging.WARNING, "KV blocks are moved by %s", said)
        return found


class RegisteredPool(Pool, Protocol):
    """A `Registration`, as far as a mover needs it."""

    @property
    def cuda(self) -> Cuda: ...


class DeviceMover:
    """Copies between the pool and KV blocks on `device` without ever waiting for it.

    Build and call it in threads whose current CUDA device is this one. `after` is a mark, or an event of torch's. The
    planes' memory and the registration must outlive it until `close()` has returned. Building it waits for the device,
    compiles the kernels (a second, the first time on a machine) and takes `staging_bytes` of the device's memory.
    """

    def __init__(
        self,
        mapping: Mapping,
        regions: Sequence[Region],
        registration: RegisteredPool,
        device: Any,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`device` is what torch takes for one, or a `Device`. Raises `CudaError`, and `ValueError` where a piece
        doesn't fit the staging."""
        self.regions = tuple(regions)
        self._mapping, self._registration, self._cuda = mapping, registration, registration.cuda
        self._device: Device = device if hasattr(device, "current_stream") else TorchDevice(device)
        self._events = Events(self._cuda)
        self._error: str | None = None
        self._closed = False
        self.hung = False
        """Closed, with copies that have not ended: the pool must stay registered."""
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._helper: threading.Thread | None = None
        self._helper_lock = threading.Lock()
        direct = all(is_direct(region, load=load) for region in self.regions for load in (True, False))
        kernels = None if direct else self._device.kernels()
        self._load, self._store = (self._lane(load, staging_bytes // 2, kernels) for load in (True, False))
        self._device.settle()

    def load(self, transfers: Sequence[Transfer], *, after: object | None = None) -> DeviceTicket:
        return self._submit(self._load, transfers, after)

    def store(self, transfers: Sequence[Transfer], *, after: object | None = None) -> DeviceTicket:
        if not self._mapping.writable:
            raise ValueError("the pool is mapped read-only: nothing can be stored")
        return self._submit(self._store, transfers, after)

    def enter_thread(self) -> None:
        self._cuda.enter_thread(self._device.index)

    def mark(self) -> Mark:
        mark = Mark(self._events)
        self._cuda.record(mark.cuda_event, self._device.current_stream())
        return mark

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._abandon("the mover is closed")
        with self._helper_lock:
            self._stopping.set()
            helper = self._helper
        self._wake.set()
        deadline = time.monotonic() + CLOSE_S
        if helper is not None:
            helper.join(CLOSE_S)
        try:
            events = [event for lane in (self._load, self._store) for event in lane.flush()]
            while not all(self._cuda.event_query(event) for event in events):
                if time.monotonic() > deadline:
                    log.error(
                        "copies between pool and device have not ended within %g s: their memory is kept", CLOSE_S
                    )
                    self.hung = True
                    _hung.append(self)
                    return
                time.sleep(PAUSE_S)
            for event in events:
                self._cuda.destroy_event(event)
            for lane in (self._load, self._store):
                lane.close()
            self._events.close()
        except CudaError as error:
            log.warning("the mover ends with its device in error: %s", error)

    def _lane(self, load: bool, staging_bytes: int, kernels: Kernels | None) -> Lane:
        return Lane(
            load=load,
            cuda=self._cuda,
            pool=self._registration,
            pool_address=self._mapping.bytes.ctypes.data,
            regions=self.regions,
            staging_bytes=staging_bytes,
            kernels=kernels,
            memory=self._device,
            failed=self._fail,
            overflow=self._call_helper,
        )

    def _submit(self, lane: Lane, transfers: Sequence[Transfer], after: object | None) -> DeviceTicket:
        check(transfers, self.regions, self._mapping.size)
        if self._error is not None:
            raise MoverFailed(self._error)
        ticket = DeviceTicket(self._cuda, self._events, lane.advance)
        lane.submit(ticket, transfers, cast("Event | None", after))
        return ticket

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            log.error("the mover stops: %s", error, exc_info=not isinstance(error, CudaError))
        self._abandon(f"the mover has failed: {error}")

    def _abandon(self, error: str) -> None:
        self._error = self._error or error
        for lane in (self._load, self._store):
            lane.abandon(self._error)

    # ---- the helper: goes on where a call had to stop, and makes the copies that block ---------------------------

    def _call_helper(self) -> None:
        self._wake.set()
        with self._helper_lock:
            if self._helper is None and not self._stopping.is_set():
                self._helper = threading.Thread(target=self._help, name="moonpool-mover", daemon=True)
                self._helper.start()

    def _help(self) -> None:
        try:
            self._cuda.enter_thread(self._device.index)
        except CudaError as error:
            self._fail(error)
            return
        lanes = (self._load, self._store)
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._stopping.is_set() and any(lane.waiting for lane in lanes):
                moved = [lane.help() for lane in lanes]
                if not any(moved):
                    time.sleep(HELPER_PAUSE_S)
