"""Between a staging slot, where parts of objects lie one after another, and the blocks of the KV cache.

*Gather* copies blocks into the slot, *scatter* the slot into the blocks. Two implementations do the same: Triton, and
torch as its plain twin, for the host's memory too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moonpool.gpu.mover import Plane, Region
from moonpool.gpu.plan import Part

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

WORDS = (16, 4, 1)
"""What a thread may copy at once, bytes: the largest that all addresses and lengths are multiples of."""


@dataclass(frozen=True, slots=True)
class Group:
    """The planes of one part of an object that have pieces of the same length, and where each begins in the part."""

    planes: tuple[Plane, ...]
    starts: tuple[int, ...]
    blocks: int
    part_bytes: int

    @property
    def piece_bytes(self) -> int:
        return self.planes[0].piece_bytes

    @property
    def word_bytes(self) -> int:
        """The largest word that fits all of it, where slots begin at multiples of 256."""
        figures = [self.part_bytes, self.piece_bytes, *self.starts]
        figures += [figure for plane in self.planes for figure in (plane.address, plane.stride_bytes)]
        return next(word for word in WORDS if all(figure % word == 0 for figure in figures))

    def table(self) -> Ids:
        """What a kernel reads of the planes: addresses, strides, starts; int64 of shape (3, planes)."""
        rows = ([p.address for p in self.planes], [p.stride_bytes for p in self.planes], self.starts)
        return np.array(rows, np.int64)


def groups(region: Region, part: Part) -> tuple[Group, ...]:
    """The part's planes by the length of their pieces: one launch each."""
    members: dict[int, list[tuple[Plane, int]]] = {}
    at = 0
    for plane in region.planes[part.first_plane : part.first_plane + part.planes]:
        members.setdefault(plane.piece_bytes, []).append((plane, at))
        at += part.blocks * plane.piece_bytes
    return tuple(
        Group(tuple(plane for plane, _ in found), tuple(start for _, start in found), part.blocks, part.length)
        for found in members.values()
    )


class Launch(Protocol):
    """One group's copy, prepared. Queues it on `stream` and returns.

    `ids` are the block ids of the objects that lie in the slot at address `slot`, shape (objects, blocks), negative
    where a block is to be skipped; `ids_address` is where the same lie on the device.
    """

    def __call__(self, slot: int, ids: Ids, ids_address: int, stream: int) -> None: ...


class Kernels(Protocol):
    """A way to gather and scatter on one device."""

    name: str

    def prepare(self, group: Group, *, gather: bool) -> Launch:
        """Everything that takes long (compiling, tables) happens here. The launch keeps what it needs alive."""


class TorchKernels:
    """torch's own indexing: one operation a plane. For devices without Triton, and to check it against."""

    name = "torch"

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)

    def prepare(self, group: Group, *, gather: bool) -> Launch:
        torch = self._torch

        def launch(slot: int, ids: Ids, ids_address: int, stream: int) -> None:
            items, blocks = np.nonzero(ids >= 0)
            if not len(items):
                return
            with self._on(stream):
                size = group.piece_bytes
                staged = self._tensor(slot, len(ids) * group.part_bytes)
                there = torch.from_numpy(ids[items, blocks]).to(self._device)
                here = torch.from_numpy(items * group.part_bytes + blocks * size).to(self._device)
                inside = torch.arange(size, device=self._device)
                for plane, start in zip(group.planes, group.starts, strict=True):
                    reach = int(ids.max()) * plane.stride_bytes + size
                    blocks_of = self._tensor(plane.address, reach)
                    target = (here[:, None] + start + inside).flatten()
                    source = (there[:, None] * plane.stride_bytes + inside).flatten()
                    if gather:
                        staged[target] = blocks_of[source]
                    else:
                        blocks_of[source] = staged[target]

        return launch

    def _on(self, stream: int) -> Any:
        if self._device.type == "cpu":
            from contextlib import nullcontext

            return nullcontext()
        return self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream, device=self._device))

    def _tensor(self, address: int, size: int) -> Any:
        """Bytes at an address of the device as a tensor that doesn't own them."""
        if self._device.type == "cpu":
            return self._torch.from_numpy(host_array(address, (size,)))
        return self._torch.as_tensor(_Memory(address, (size,), None), device=self._device)


class _Memory:
    """What numpy and torch take for an array at an address; it owns nothing."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.__array_interface__ = self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": "|u1", "version": 3,
        }  # fmt: skip


def host_array(address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Bytes:
    """Bytes at an address of this process as a writable array, which must not outlive the memory."""
    return np.asarray(_Memory(address, shape, strides))


def choose(device: Any, upload: Callable[[Ids], Any]) -> tuple[Kernels, str]:
    """The quickest kernels that work here, and a line that says what was tried. `upload` brings a table to the
    device, as a tensor."""
    try:
        from moonpool.gpu.triton_kernels import TritonKernels

        found = TritonKernels(upload)
        found.try_out(device)
    except Exception as error:  # whatever a compiler may fail with: the twin is always there
        return TorchKernels(device), f"torch's kernels, since Triton's don't work: {type(error).__name__}: {error}"
    return found, f"Triton's kernels, launched {found.way}"
