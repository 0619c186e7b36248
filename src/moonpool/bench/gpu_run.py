"""The measurements of `moonpool bench gpu`: objects between the pool and a GPU's memory, their bytes verified, beside
the copies that CUDA makes of pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

import moonpool
from moonpool.bench.copies import expect_ok
from moonpool.bench.figures import gbps, median_us, size_label, tidy
from moonpool.bench.keys import Keys
from moonpool.bench.local import Progress
from moonpool.bench.node import wait_until_settled
from moonpool.errors import MoonpoolError
from moonpool.gpu.device import DeviceMover, RegisteredPool, TorchDevice
from moonpool.gpu.kernels import groups
from moonpool.gpu.mover import Plane, Region, Ticket, Transfer
from moonpool.gpu.plan import Piece, parts, split
from moonpool.gpu.registration import Registration
from moonpool.gpu.tickets import PAUSE_S

OBJECT_BYTES = 32 << 20
"""256 tokens of Llama-3.1-8B: 32 layers of 16 blocks of 64 KB."""
BLOCKS = 16
PIECES = (2 << 20, 256 << 10, 64 << 10, 32 << 10)
CHUNK_BYTES = 1 << 30
SUBMIT_OBJECTS = 24
"""Few enough to be all submitted within the call: what a call costs, not how it waits for room."""

PASSES_UNCOUNTED = 2

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: `objects` a pass and direction, and `passes`, the uncounted ones with them."""

    objects: int = 64
    passes: int = 11

    @property
    def extent_bytes(self) -> int:
        """Room for the objects wherever they begin with respect to the borders of chunks."""
        return self.objects * OBJECT_BYTES + OBJECT_BYTES

    @property
    def pool_bytes(self) -> int:
        return 2 * self.extent_bytes + (256 << 20)


def measure(url: str, device: int, scale: Scale, progress: Progress) -> Result:
    """All figures, flat. Raises `MoonpoolError` where bytes arrive that weren't sent."""
    with moonpool.connect(url, name="bench gpu", timeout_s=60.0) as client:
        with progress("faulting the pool in", None):
            wait_until_settled(client, checksums=False)
        keys = Keys("bench-gpu", 5).take(2)
        with client.reserve_many(keys, [scale.extent_bytes] * 2) as reservations:
            expect_ok(reservations.statuses, "reserve")
            extents = [reservation.buffer for reservation in reservations]
            run = _Run(client, [extent for extent in extents if extent is not None], device, scale, progress)
            try:
                run.all()
            finally:
                run.close()
                for reservation in reservations:
                    reservation.abort()
    return run.result


class _Cache:
    """A KV cache on the GPU in pieces of one size: planes of blocks, and shuffled blocks for each object."""

    def __init__(self, torch: Any, device: Any, piece_bytes: int, objects: int, random: Random) -> None:
        self.torch, self.piece_bytes = torch, piece_bytes
        planes = OBJECT_BYTES // BLOCKS // piece_bytes
        self.blocks = torch.empty((planes, objects * BLOCKS, piece_bytes), dtype=torch.uint8, device=device)
        stride = objects * BLOCKS * piece_bytes
        self.region = Region(
            tuple(Plane(self.blocks.data_ptr() + i * stride, piece_bytes, piece_bytes) for i in range(planes)), BLOCKS
        )
        ids = list(range(objects * BLOCKS))
        random.shuffle(ids)
        self.ids = [tuple(ids[i * BLOCKS : (i + 1) * BLOCKS]) for i in range(objects)]

    def poison(self, value: int) -> None:
        self.blocks.fill_(value)
        self.torch.cuda.synchronize()

    def randomize(self, seed: int) -> None:
        self.torch.manual_seed(seed)
        self.blocks.view(self.torch.int32).random_(-(1 << 31), (1 << 31) - 1)
        self.torch.cuda.synchronize()

    def check(self, number: int, extent: npt.NDArray[np.uint8], what: str) -> None:
        """That an object's blocks are the extent's bytes."""
        # By way of the heap: torch's own copy may cross the border of a registered chunk, which CUDA refuses.
        expected = self.torch.from_numpy(extent.copy()).to(self.blocks.device).view(-1, BLOCKS, self.piece_bytes)
        found = self.blocks[:, list(self.ids[number])]
        if not self.torch.equal(found, expected):
            raise MoonpoolError(f"{what}: other bytes have arrived than were sent: a bug, please report")


class _Run:
    """One measurement. `extents` are two ranges of the pool that this client may write to."""

    def __init__(
        self, client: moonpool.Client, extents: list[Any], device: int, scale: Scale, progress: Progress
    ) -> None:
        import torch

        from moonpool.gpu.cudart import Runtime

        self.torch, self.device, self.scale, self.progress = torch, torch.device("cuda", device), scale, progress
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        torch.zeros(1, device=self.device)
        self.cuda = Runtime()
        self.random = Random(11)
        attachment = client.link.attachment
        assert attachment is not None
        self.pool = attachment.pool
        start = self.pool.bytes.ctypes.data
        self.extents = [int(extent.ctypes.data) - start for extent in extents]
        self.result: Result = {"gpu": torch.cuda.get_device_name(self.device), "torch": torch.__version__}
        self.result |= {"object_bytes": OBJECT_BYTES, "objects": scale.objects, "pool_bytes": self.pool.size}
        self.attachment = attachment
        self.registration: Registration | None = None
        self.caches = [self._cache(64 << 10) for _ in range(2)]
        self._fill()
        self._warm()

    def all(self) -> None:
        with self.progress("while registration is under way", None):
            self._frontier()
        with self.progress("pinned memory", None):
            self._allocate_pinned()
        for name in ("to_gpu", "from_gpu", "both_to_gpu", "both_from_gpu"):
            self.result[f"{name}_gbps"] = {}
        self.result |= {"load_submit_us": {}, "store_submit_us": {}, "kernel_gbps": {}, "forward_slowdown": {}}
        self._pinned: dict[str, list[float]] = {"to": [], "from": [], "both_to": [], "both_from": []}
        for piece in PIECES:
            with self.progress(f"pieces of {size_label(piece)}", None):
                self._pieces(piece)
        for name, samples in self._pinned.items():
            self.result[f"pinned_{name}_gpu_gbps"] = gbps(self.scale.objects * OBJECT_BYTES, samples)
        with self.progress("across a border, and not registered", None):
            self._border()
            self._unregistered()
        with self.progress("kernels, and matrix products beside copies", None):
            self._kernels()
            self._forward()

    def _register(self) -> Registration:
        index = self.device.index
        self.registration = Registration.of(self.attachment, device=index, chunk_bytes=CHUNK_BYTES, cuda=self.cuda)
        return self.registration

    def close(self) -> None:
        if self.registration is not None:
            self.registration.close()

    # ---- stages --------------------------------------------------------------------------------------------------

    def _frontier(self) -> None:
        """Loads of eight objects from all over the extent, for as long as chunks are being registered."""
        cache, moved, longest = self.caches[0], 0, 0.0
        cache.poison(0xEE)
        begun = perf_counter()
        registration = self._register()
        mover = self._mover([cache.region])
        loading = perf_counter()
        numbers = list(range(self.scale.objects))
        seen: set[int] = set()
        while not registration.done.is_set() or not seen:
            chosen = self.random.sample(numbers, 8)
            at = perf_counter()
            ticket = mover.load(self._transfers(cache, 0, chosen))
            longest = max(longest, perf_counter() - at)
            self._finish(ticket)
            seen |= set(chosen)
            moved += len(chosen)
        taken = perf_counter() - loading
        if registration.refused:
            raise MoonpoolError(f"the pool can't be registered: {registration.refused}")
        self._check(cache, 0, sorted(seen), "while registration is under way")
        self.result |= {
            "registration_s": tidy(registration.seconds),
            "registration_with_touching_s": tidy(loading - begun + taken),
            "registration_gbps": tidy(self.pool.size / registration.seconds / 1e9),
            "frontier_to_gpu_gbps": tidy(moved * OBJECT_BYTES / taken / 1e9),
            "frontier_objects": moved,
            "frontier_submit_max_us": tidy(longest * 1e6),
        }
        mover.close()

    def _pieces(self, piece_bytes: int) -> None:
        label, result = size_label(piece_bytes), self.result
        cache, other = self.caches if piece_bytes == 64 << 10 else [self._cache(piece_bytes) for _ in range(2)]
        mover = self._mover([cache.region, other.region])
        every = range(self.scale.objects)
        loads, stores = self._transfers(cache, 0, every), self._transfers(other, 1, every, region=1)
        cache.poison(0xEE)
        self._extent(1)[:] = 0xEE
        other.randomize(piece_bytes)
        taken_s = self._passes(
            {
                "load": lambda: mover.load(loads),
                "to": lambda: self._copy_pinned(True),
                "store": lambda: mover.store(stores),
                "from": lambda: self._copy_pinned(False),
            }
        )
        for name in ("to", "from"):
            self._pinned[name] += taken_s[name]
        self._check(cache, 0, every, f"loads of {label}")
        self._check(other, 1, every, f"stores of {label}")
        cache.poison(0xEE)
        self._extent(1)[:] = 0xEE
        total = self.scale.objects * OBJECT_BYTES
        result["to_gpu_gbps"][label] = gbps(total, taken_s["load"])
        result["from_gpu_gbps"][label] = gbps(total, taken_s["store"])
        both = self._both(lambda: mover.load(loads), lambda: mover.store(stores))
        result["both_to_gpu_gbps"][label], result["both_from_gpu_gbps"][label] = (gbps(total, one) for one in both)
        self._check(cache, 0, every, f"loads of {label}, both ways at once")
        self._check(other, 1, every, f"stores of {label}, both ways at once")
        pinned = self._both(lambda: self._copy_pinned(True), lambda: self._copy_pinned(False))
        self._pinned["both_to"] += pinned[0]
        self._pinned["both_from"] += pinned[1]
        result["load_submit_us"][label] = self._submit_us(mover.load, loads)
        result["store_submit_us"][label] = self._submit_us(mover.store, stores)
        mover.close()

    def _border(self) -> None:
        """Objects placed so that the border of a chunk goes through the middle of one or more."""
        cache, scale = self.caches[0], self.scale
        region, start = cache.region, self.extents[0]
        border = (start // CHUNK_BYTES + 1) * CHUNK_BYTES
        shift = (border - start - OBJECT_BYTES // 2) % OBJECT_BYTES
        transfers = [Transfer(start + shift + i * OBJECT_BYTES, 0, cache.ids[i]) for i in range(scale.objects)]
        crossing = sum(t.offset // CHUNK_BYTES != (t.offset + OBJECT_BYTES - 1) // CHUNK_BYTES for t in transfers)
        mover = self._mover([region])
        cache.poison(0xEE)
        to = self._passes({"load": lambda: mover.load(transfers)})["load"]
        for number, transfer in enumerate(transfers):
            cache.check(number, self._bytes(transfer.offset), "loads across a border")
        cache.randomize(3)
        back = self._passes({"store": lambda: mover.store(transfers)})["store"]
        for number, transfer in enumerate(transfers):
            cache.check(number, self._bytes(transfer.offset), "stores across a border")
        mover.close()
        total = scale.objects * OBJECT_BYTES
        self.result |= {"border_objects": crossing}
        self.result |= {"border_to_gpu_gbps": gbps(total, to), "border_from_gpu_gbps": gbps(total, back)}

    def _unregistered(self) -> None:
        """As where registration is refused: the helper's copies. A few objects: they are slow."""
        cache, chosen = self.caches[0], range(8)
        self.close()
        mover = self._mover([cache.region], _Unregistered(self.cuda))
        transfers = self._transfers(cache, 0, chosen)
        for name, submit in (("to", mover.load), ("from", mover.store)):
            (cache.poison if name == "to" else cache.randomize)(0xEE)
            samples = []
            for _ in range(3):
                begun = perf_counter()
                self._finish(submit(transfers))
                samples.append(perf_counter() - begun)
            self._check(cache, 0, chosen, f"not registered, {name} the GPU")
            self.result[f"unregistered_{name}_gpu_gbps"] = gbps(len(chosen) * OBJECT_BYTES, samples)
        mover.close()
        if not self._register().done.wait(60):
            raise MoonpoolError("registering the pool a second time doesn't end")

    def _kernels(self) -> None:
        """What gather and scatter reach by themselves, slot by slot, by the number of programs."""
        from moonpool.gpu.triton_kernels import TritonKernels

        torch, cache = self.torch, self.caches[0]
        slot = torch.zeros(OBJECT_BYTES, dtype=torch.uint8, device=self.device)
        ids = np.array([cache.ids[0]], np.int64)
        on_device = torch.from_numpy(ids).to(self.device)
        (part,) = parts(cache.region, OBJECT_BYTES)
        (group,) = groups(cache.region, part)
        stream = torch.cuda.current_stream().cuda_stream
        for programs in (8, 16, 32, 64):
            kernels = TritonKernels(lambda table: torch.from_numpy(table).to(self.device), programs)
            for name in ("gather", "scatter"):
                launch = kernels.prepare(group, gather=name == "gather")
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                for repeat in range(12):
                    if repeat == 2:
                        events[0].record()
                    launch(slot.data_ptr(), ids, on_device.data_ptr(), stream)
                events[1].record()
                torch.cuda.synchronize()
                taken_s = events[0].elapsed_time(events[1]) / 10 / 1e3
                self.result["kernel_gbps"][f"{name}_64KB_{programs}_programs"] = tidy(OBJECT_BYTES / taken_s / 1e9)
        self.result["kernel_way"] = kernels.way

    def _forward(self) -> None:
        """How much longer matrix products take while objects move."""
        torch = self.torch
        a, b = (torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16) for _ in range(2))

        def products() -> float:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(200):
                a @ b
            events[1].record()
            events[1].synchronize()
            return float(events[0].elapsed_time(events[1]))

        products()
        alone = median(products() for _ in range(5))
        mover = self._mover([self.caches[0].region])
        transfers = self._transfers(self.caches[0], 0, range(self.scale.objects))
        for name, submit in (("loads", mover.load), ("stores", mover.store)):
            stop = threading.Event()
            moving = threading.Thread(target=self._keep_moving, args=(submit, transfers, stop))
            moving.start()
            self.result["forward_slowdown"][name] = tidy(median(products() for _ in range(5)) / alone)
            stop.set()
            moving.join()
        mover.close()

    # ---- parts of stages -----------------------------------------------------------------------------------------

    def _keep_moving(
        self, submit: Callable[[Sequence[Transfer]], Ticket], transfers: list[Transfer], stop: Any
    ) -> None:
        self.torch.cuda.set_device(self.device)
        while not stop.is_set():
            self._finish(submit(transfers))

    def _passes(self, kinds: dict[str, Callable[[], Ticket]]) -> dict[str, list[float]]:
        """Seconds of each pass, all kinds in turn."""
        samples: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(self.scale.passes):
            for name, begin in kinds.items():
                begun = perf_counter()
                self._finish(begin())
                if number >= PASSES_UNCOUNTED:
                    samples[name].append(perf_counter() - begun)
        return samples

    def _both(self, first: Callable[[], Ticket], second: Callable[[], Ticket]) -> tuple[list[float], list[float]]:
        """Seconds of each of two that run at once. The rate of each is over its own time."""
        samples: tuple[list[float], list[float]] = ([], [])
        for number in range(self.scale.passes):
            begun = perf_counter()
            tickets: list[Ticket | None] = [first(), second()]
            while any(tickets):
                for index, ticket in enumerate(tickets):
                    if ticket is not None and ticket.done():
                        self._finish(ticket)
                        tickets[index] = None
                        if number >= PASSES_UNCOUNTED:
                            samples[index].append(perf_counter() - begun)
        return samples

    def _submit_us(self, submit: Callable[[Sequence[Transfer]], Ticket], transfers: list[Transfer]) -> float:
        """Microseconds of the caller's time for an object, in a batch that is all submitted at once."""
        batch = transfers[:SUBMIT_OBJECTS]
        samples, asked = [], []
        for _ in range(20):
            begun = perf_counter()
            ticket = submit(batch)
            samples.append((perf_counter() - begun) / len(batch))
            begun = perf_counter()
            ticket.done()
            asked.append(perf_counter() - begun)
            self._finish(ticket)
        self.result["poll_us"] = median_us(asked)
        return median_us(samples)

    def _finish(self, ticket: Ticket) -> None:
        if not ticket.wait(60):
            raise MoonpoolError("copies between pool and GPU don't end")
        if ticket.error is not None:
            raise MoonpoolError(f"copies between pool and GPU have failed: {ticket.error}")

    def _check(self, cache: _Cache, extent: int, numbers: Sequence[int], what: str) -> None:
        for number in numbers:
            cache.check(number, self._bytes(self.extents[extent] + number * OBJECT_BYTES), what)

    def _transfers(self, cache: _Cache, extent: int, numbers: Sequence[int], region: int = 0) -> list[Transfer]:
        return [Transfer(self.extents[extent] + i * OBJECT_BYTES, region, cache.ids[i]) for i in numbers]

    def _mover(self, regions: list[Region], registration: RegisteredPool | None = None) -> DeviceMover:
        registration = registration or self.registration
        assert registration is not None
        return DeviceMover(self.pool, regions, registration, self.device)

    def _cache(self, piece_bytes: int) -> _Cache:
        return _Cache(self.torch, self.device, piece_bytes, self.scale.objects, self.random)

    def _bytes(self, offset: int) -> npt.NDArray[np.uint8]:
        return self.pool.bytes[offset : offset + OBJECT_BYTES]

    def _extent(self, number: int) -> npt.NDArray[np.uint8]:
        return self.pool.bytes[self.extents[number] : self.extents[number] + self.scale.extent_bytes]

    def _fill(self) -> None:
        """Random bytes, no two objects alike."""
        base = np.random.default_rng(9).integers(0, 256, OBJECT_BYTES + 4096 * (self.scale.objects + 1), np.uint8)
        for number in range(self.scale.objects + 1):
            at = self.extents[0] + number * OBJECT_BYTES
            np.copyto(self._bytes(at), base[number * 4096 : number * 4096 + OBJECT_BYTES])
        self._extent(1)[:] = 0

    def _warm(self) -> None:
        """Compile the kernels before anything is timed."""
        self.result["kernels"] = TorchDevice(self.device).kernels().name
        self._mover([self.caches[0].region], _Unregistered(self.cuda)).close()

    def _allocate_pinned(self) -> None:
        torch = self.torch
        self._host: list[Any] = [torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._there: list[Any] = [torch.empty(256 << 20, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._streams = [self.cuda.stream(urgent=False) for _ in range(2)]

    def _copy_pinned(self, to_gpu: bool) -> Ticket:
        """As many bytes as a pass moves, in copies of an object's size, between pinned memory and the GPU."""
        host, there, stream = self._host[to_gpu], self._there[to_gpu], self._streams[to_gpu]
        for number in range(self.scale.objects):
            ours = host.data_ptr() + number * OBJECT_BYTES % len(host)
            theirs = there.data_ptr() + number * OBJECT_BYTES % len(there)
            self.cuda.copy(*((theirs, ours) if to_gpu else (ours, theirs)), OBJECT_BYTES, stream)
        return _Copied(self.cuda, stream)


class _Copied:
    """All that a stream has been given by now, as a ticket."""

    error: str | None = None

    def __init__(self, cuda: Any, stream: int) -> None:
        self._cuda, self._event = cuda, cuda.event()
        cuda.record(self._event, stream)

    def done(self) -> bool:
        return bool(self._cuda.event_query(self._event))

    read = done

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline = perf_counter() + (timeout_s or 0)
        while not self.done():
            if timeout_s is not None and perf_counter() > deadline:
                return False
            sleep(PAUSE_S)
        return True


class _Unregistered:
    """The registration of a pool that can't be registered."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def split(self, offset: int, length: int) -> list[Piece]:
        return split(offset, length, CHUNK_BYTES, 0)
