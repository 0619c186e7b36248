"""Shadow mode: some hits are computed all the same, and what is stored is compared with what was computed.

A test of the whole chain (keys, layout, copies, whoever stored it) in production, at the price of those hits. What
differs is logged with who wrote it and when, and removed from the pool, so that nobody loads it.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from moonpool.engines.vllm.compat import Unsupported
from moonpool.engines.vllm.metadata import Check, Checked, Extent, Part, WorkerReport, extents_of, own_extents
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.spaces import RankSpaces
from moonpool.engines.vllm.stats import Tally
from moonpool.errors import MoonpoolError
from moonpool.gpu.kernels import Bytes, host_array
from moonpool.gpu.mover import SKIP, Plane, Region

log = logging.getLogger("moonpool.vllm")

CHECK_BYTES = 64 << 20
"""Of a hit so much is compared on each rank, drawn at random: computed blocks are copied aside for it, in the memory
that they lie in, so that the engine needn't keep them."""
UNDER_WAY_MAX = 4
"""Checks of one engine; a hit that would be another one is loaded."""
FLOATS_IN_BYTES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What vLLM's caches of bytes hold, by `cache_dtype`. Those with scales among the values aren't among it: where two
computations differ by a rounding, so do the scales' bytes."""

Kinds = tuple[tuple[str, ...], ...]
"""Per region and plane the name of torch's type of its values."""


# ---- the scheduler's side --------------------------------------------------------------------------------------------


class Shadows:
    """Which hits are compared, and their holds until all ranks have done so. For the scheduler's thread."""

    def __init__(
        self,
        rate: float,
        ranks: int,
        tally: Tally,
        drop_hold: Callable[[str], None],
        draw: random.Random | None = None,
    ) -> None:
        self._rate, self._ranks, self._tally, self._drop_hold = rate, ranks, tally, drop_hold
        self._draw = draw or random.Random()
        self._under_way: dict[int, tuple[str, int]] = {}
        """Per check the hold, and how many ranks haven't reported."""

    def picks(self) -> bool:
        """Whether the next hit is one of the sample."""
        return bool(self._rate) and len(self._under_way) < UNDER_WAY_MAX and self._draw.random() < self._rate

    def sample(self, parts: Sequence[tuple[bytes, Part]]) -> list[tuple[bytes, Part]]:
        """Of a hit's objects, each with its digest, those to be compared."""
        left = CHECK_BYTES
        found: list[tuple[bytes, Part]] = []
        for digest, part in self._draw.sample(parts, len(parts)):
            left -= max(extent.size for extent in part.extents)
            if found and left < 0:
                break
            found.append((digest, part))
        return found

    def began(self, number: int, hold: str) -> None:
        """A check is handed to the workers; its objects are held under this name, from now on by this object."""
        self._under_way[number] = hold, self._ranks

    def reported(self, number: int, checked: Checked) -> None:
        """Some ranks have done their part of a check."""
        for result in ("same", "different", "dropped"):
            if count := getattr(checked, result):
                self._tally.shadowed(result, count)
        if number in self._under_way:
            hold, missing = self._under_way.pop(number)
            if missing > checked.ranks:
                self._under_way[number] = hold, missing - checked.ranks
            else:
                self._drop_hold(hold)

    def close(self) -> None:
        for hold, _ in self._under_way.values():
            self._drop_hold(hold)
        self._under_way.clear()


# ---- a worker's side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of a check, and a copy of what was computed of it."""

    key: bytes
    extent: Extent
    group: int
    blocks: int
    """Of the object."""
    kept: tuple[int, ...]
    """Which of them were computed."""
    planes: list[Any]
    """Per plane a tensor of bytes: one row a kept block."""


class Comparer:
    """Compares checks' objects in a thread of its own. The planes' memory must outlive it until `close` has returned.

    `begin` and `abandon` are for the worker's thread; results come by way of `tell`, from any thread.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        kinds: Kinds,
        device: Any,
        tolerance: float,
        pool: Pool,
        tell: Callable[[WorkerReport], None],
    ) -> None:
        """`device` is what torch takes for one. Raises what torch raises where it has no such device."""
        import torch

        self._torch, self._device = torch, torch.device(device)
        self._regions, self._kinds, self._tolerance, self._pool, self._tell = regions, kinds, tolerance, pool, tell
        self._stream = None if self._device.type == "cpu" else torch.cuda.Stream(self._device)
        self._thread = ThreadPoolExecutor(1, "moonpool-shadow")
        self._under_way: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin(self, check: Check, rank: int, spaces: RankSpaces) -> None:
        """Copy aside what has been submitted to the engine's stream by now, and have it compared. Raises
        `MoonpoolError`; then nothing is told of the check."""
        attachment = self._pool.client.link.attachment
        if attachment.pool_id != check.load.pool_id:
            raise MoonpoolError("the pool that holds it is not attached here")
        objects = list(self._objects(check, rank, spaces))
        ready = None if self._stream is None else self._torch.cuda.current_stream(self._device).record_event()
        with self._lock:
            self._under_way[check.number] = len(objects)
        self._thread.submit(self._compare, check, rank, objects, attachment.pool.bytes, ready)

    def close(self) -> dict[int, Checked]:
        """End it: what hasn't been compared by then is dropped, and returned, to be reported."""
        self._thread.shutdown(cancel_futures=True)
        with self._lock:
            left, self._under_way = self._under_way, {}
        return {number: Checked(1, dropped=objects) for number, objects in left.items()}

    # ---- within --------------------------------------------------------------------------------------------------

    def _objects(self, check: Check, rank: int, spaces: RankSpaces) -> Iterator[_Object]:
        for (part, extent), digest in zip(own_extents(check.load, rank), check.digests, strict=True):
            region = self._regions[part.group]
            if extent.size != region.object_bytes:
                raise MoonpoolError(f"an object of {extent.size} bytes where this worker's have {region.object_bytes}")
            kept = tuple(i for i, block in enumerate(part.blocks) if block != SKIP)
            ids = [part.blocks[i] for i in kept]
            if ids:
                key = spaces.of(check.adapter)[part.group].digest + digest
                planes = [self._copied(plane, ids) for plane in region.planes]
                yield _Object(key, extent, part.group, len(part.blocks), kept, planes)

    def _copied(self, plane: Plane, ids: list[int]) -> Any:
        shape, strides = (max(ids) + 1, plane.piece_bytes), (plane.stride_bytes, 1)
        if self._stream is None:
            return self._torch.from_numpy(host_array(plane.address, shape, strides)[ids])
        rows = self._torch.as_tensor(_DeviceRows(plane.address, shape, strides), device=self._device)
        return rows[self._torch.tensor(ids, device=self._device)]

    def _compare(self, check: Check, rank: int, objects: list[_Object], pool: Bytes, ready: Any) -> None:
        """One check, in the thread."""
        checked = Checked(1, dropped=len(objects))
        try:
            if ready is not None:
                self._stream.wait_event(ready)  # type: ignore[union-attr]
            found = [self._difference(one, pool) for one in objects]
            if self._pool.client.still_good(extents_of(check.load, rank)):
                wrong = [(one, by) for one, by in zip(objects, found, strict=True) if by]
                checked = Checked(1, len(objects) - len(wrong), len(wrong))
                self._quarantine(wrong)
        except Exception as error:  # whatever it is, the hold waits for a report
            log.warning("a hit couldn't be compared with what was computed: %s", error)
        with self._lock:
            if self._under_way.pop(check.number, None) is None:
                return
        self._tell(WorkerReport(checks={check.number: checked}))

    def _difference(self, one: _Object, pool: Bytes) -> float:
        """By how much stored and computed blocks differ at most, 0 where that is tolerated."""
        torch, at, most = self._torch, one.extent.offset, 0.0
        for plane, kind, computed in zip(
            self._regions[one.group].planes, self._kinds[one.group], one.planes, strict=True
        ):
            size = one.blocks * plane.piece_bytes
            stored = pool[at : at + size].reshape(one.blocks, plane.piece_bytes)[list(one.kept)]
            by = difference(torch.from_numpy(stored), self._fetched(computed), getattr(torch, kind))
            if by > tolerated(getattr(torch, kind), self._tolerance):
                most = max(most, by)
            at += size
        return most

    def _fetched(self, computed: Any) -> Any:
        if self._stream is None:
            return computed
        with self._torch.cuda.stream(self._stream):
            return computed.cpu()

    def _quarantine(self, wrong: list[tuple[_Object, float]]) -> None:
        """Say whose objects they are, and see to it that nobody loads them."""
        if not wrong:
            return
        client = self._pool.client
        stats = client.stat_many([one.key for one, _ in wrong])
        for (one, by), stat in zip(wrong, stats, strict=True):
            writer = "somebody" if stat is None else stat.writer
            when = "some time" if stat is None else datetime.fromtimestamp(stat.created, UTC).isoformat(" ", "seconds")
            log.error(
                "KV cache in the pool differs from what was computed by %s of a block's largest value: object %s,"
                " written by %s at %s; it is removed",
                f"{by:.2%}" if by < math.inf else "more than can be told",
                one.key.hex(),
                writer,
                when,
            )
        client.remove_many([one.key for one, _ in wrong], force=True)


class _DeviceRows:
    """What torch takes for an array in the device's memory; it owns nothing."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": "|u1", "version": 3,
        }  # fmt: skip


# ---- what is the same ------------------------------------------------------------------------------------------------


def difference(stored: Any, computed: Any, kind: Any) -> float:
    """By how much two tensors of bytes differ, whose rows are blocks of values of type `kind`: at most over all
    blocks, relative to a block's largest value. 0 where they are the same to the bit; infinite where one isn't a
    number."""
    import torch

    if torch.equal(stored, computed):
        return 0.0
    one, other = stored.view(kind).float(), computed.view(kind).float()
    largest = torch.maximum(one.abs().amax(1), other.abs().amax(1))
    apart = (one - other).abs().amax(1) / largest
    apart[(largest == 0)] = 0.0  # zeros of both signs
    return max(float(apart.where(largest.isfinite(), math.inf).max()), sys.float_info.min)


def tolerated(kind: Any, tolerance: float) -> float:
    """The difference that is no mismatch. Beside the tolerance, the smallest step of the type: a rounding decides it.
    With tolerance 0, none at all."""
    import torch

    return tolerance + float(torch.finfo(kind).eps) if tolerance else 0.0


def kinds(regions: Sequence[Region], kv_caches: Mapping[str, Any], cache_dtype: str) -> Kinds:
    """What the values of each plane are, by the tensors that the engine has registered. Raises `Unsupported`."""
    found = []
    for cache in kv_caches.values():
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            found.append((int(tensor.data_ptr()), _kind(str(tensor.dtype).removeprefix("torch."), cache_dtype)))
    starts, names = zip(*sorted(found), strict=True)
    return tuple(tuple(_kind_of(plane, starts, names) for plane in region.planes) for region in regions)


def unsupported(cache_dtype: str) -> str | None:
    """Why KV cache of this type can't be compared, None where it can."""
    if "per_token_head" in cache_dtype or cache_dtype == "fp8_ds_mla":
        return f"shadow mode is off: KV cache of type {cache_dtype!r} has its scales among the values"
    return None


def _kind(dtype: str, cache_dtype: str) -> str:
    if dtype in ("uint8", "int8"):
        if cache_dtype not in FLOATS_IN_BYTES:
            raise Unsupported(f"bytes of a KV cache of type {cache_dtype!r} can't be compared")
        return FLOATS_IN_BYTES[cache_dtype]
    return dtype


def _kind_of(plane: Plane, starts: Sequence[int], names: Sequence[str]) -> str:
    """The type of the tensor that begins where the plane does, or last before it."""
    first = int(np.searchsorted(starts, plane.address, "right")) - 1
    end = int(np.searchsorted(starts, plane.address + plane.piece_bytes, "left"))
    within = set(names[max(first, 0) : end])
    if len(within) != 1:
        raise Unsupported("blocks that hold values of several types side by side can't be compared")
    return within.pop()
