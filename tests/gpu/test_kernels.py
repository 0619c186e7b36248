"""Gather and scatter move exactly the wanted blocks, whatever the lengths, whichever implementation.

Triton's kernels run in its interpreter where there is no GPU, in a process of its own: it is chosen at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")

from moonpool.gpu.kernels import Kernels, TorchKernels, groups, host_array  # noqa: E402
from moonpool.gpu.mover import Plane, Region  # noqa: E402
from moonpool.gpu.plan import Part, parts  # noqa: E402

CUDA = bool(torch.cuda.is_available())
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCKS = 11
GUARD = 0xA5


def kernels_named(name: str, device: str) -> Kernels:
    if name == "torch":
        return TorchKernels(device)
    from moonpool.gpu.triton_kernels import TritonKernels

    return TritonKernels(lambda table: torch.from_numpy(table).to(device))


def choices() -> list[object]:
    found: list[object] = [pytest.param(("torch", "cpu"), id="torch")]
    triton = find_spec("triton") is not None
    why = "no triton" if not triton else "TRITON_INTERPRET is not 1"
    found.append(pytest.param(
        ("triton", "cpu"), id="triton-interpreted", marks=pytest.mark.skipif(not (triton and INTERPRETED), reason=why)
    ))  # fmt: skip
    for name in ("torch", "triton"):
        skip = pytest.mark.skipif(not CUDA or INTERPRETED or (name == "triton" and not triton), reason="no CUDA")
        found.append(pytest.param((name, "cuda"), id=f"{name}-cuda", marks=skip))
    return found


@pytest.fixture(params=choices())
def setup(request: pytest.FixtureRequest) -> tuple[Kernels, str]:
    name, device = request.param
    return kernels_named(name, device), device


class Cache:
    """Planes of random bytes in one allocation, with gaps between blocks that nobody may touch."""

    def __init__(self, pieces: tuple[int, ...], gap: int, device: str, first: int = 0) -> None:
        random = np.random.default_rng(7)
        self.pieces, self.gap, self.first = pieces, gap, first
        self.bytes = torch.from_numpy(
            random.integers(0, 256, first + sum(BLOCKS * (piece + gap) for piece in pieces), np.uint8)
        ).to(device)
        planes, at = [], first
        for piece in pieces:
            planes.append(Plane(self.bytes.data_ptr() + at, piece + gap, piece))
            at += BLOCKS * (piece + gap)
        self.planes = tuple(planes)

    def offset(self, plane: int, block: int) -> int:
        at = self.planes[plane].address - self.bytes.data_ptr()
        return at + block * self.planes[plane].stride_bytes


def run(
    kernels: Kernels, device: str, region: Region, part: Part, slot: object, ids: list[list[int]], *, gather: bool
) -> None:
    table = np.array(ids, np.int64)[:, part.first_block : part.first_block + part.blocks]
    table = np.ascontiguousarray(table)
    on_device = torch.from_numpy(table).to(device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    for group in groups(region, part):
        kernels.prepare(group, gather=gather)(slot.data_ptr(), table, on_device.data_ptr(), stream)  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.synchronize()


SHAPES = [
    pytest.param((64,), 0, 0, id="one small plane"),
    pytest.param((4096, 4096, 4096), 4096, 0, id="three planes with gaps"),
    pytest.param((48, 48), 16, 0, id="multiples of 16, no power of two"),
    pytest.param((20, 20), 4, 0, id="words of 4"),
    pytest.param((7, 7), 0, 0, id="bytes"),
    pytest.param((64, 64), 0, 3, id="an odd address"),
    pytest.param((65536 + 32,), 0, 0, id="several tiles a piece"),
    pytest.param((128, 32, 128), 0, 0, id="lengths mixed"),
]


@pytest.mark.parametrize(("pieces", "gap", "first"), SHAPES)
def test_gather_and_scatter_move_the_wanted_blocks_and_nothing_else(
    setup: tuple[Kernels, str], pieces: tuple[int, ...], gap: int, first: int
) -> None:
    kernels, device = setup
    cache = Cache(pieces, gap, device, first)
    region = Region(cache.planes, 4)
    ids = [[3, 0, -1, 10], [9, -1, 1, 2], [4, 5, 6, 7]]
    part = parts(region, region.object_bytes)[0]
    slot = torch.full((len(ids) * part.length,), GUARD, dtype=torch.uint8, device=device)
    before = cache.bytes.cpu().numpy().copy()
    run(kernels, device, region, part, slot, ids, gather=True)
    expected = np.full(len(ids) * part.length, GUARD, np.uint8)
    at = 0
    for row in ids:
        for plane, piece in enumerate(pieces):
            for block in row:
                if block >= 0:
                    start = cache.offset(plane, block)
                    expected[at : at + piece] = before[start : start + piece]
                at += piece
    assert np.array_equal(slot.cpu().numpy(), expected)
    assert np.array_equal(cache.bytes.cpu().numpy(), before)

    fresh = np.random.default_rng(8).integers(0, 256, len(expected), np.uint8)
    slot.copy_(torch.from_numpy(fresh))
    run(kernels, device, region, part, slot, ids, gather=False)
    wanted = before.copy()
    at = 0
    for row in ids:
        for plane, piece in enumerate(pieces):
            for block in row:
                if block >= 0:
                    start = cache.offset(plane, block)
                    wanted[start : start + piece] = fresh[at : at + piece]
                at += piece
    assert np.array_equal(cache.bytes.cpu().numpy(), wanted)
    assert np.array_equal(slot.cpu().numpy(), fresh)


def test_parts_of_an_object_together_are_the_object(setup: tuple[Kernels, str]) -> None:
    """An object that doesn't fit a slot: planes 0 and 1 together, then the long plane in two runs of its blocks."""
    kernels, device = setup
    cache = Cache((32, 32, 128), 0, device)
    region = Region(cache.planes, 4)
    cut = parts(region, 300)
    assert len(cut) > 2
    found = np.zeros(region.object_bytes, np.uint8)
    for part in cut:
        slot = torch.zeros(part.length, dtype=torch.uint8, device=device)
        run(kernels, device, region, part, slot, [[8, 2, 5, 1]], gather=True)
        found[part.offset : part.offset + part.length] = slot.cpu().numpy()
    memory = cache.bytes.cpu().numpy()
    expected = [
        memory[cache.offset(plane, block) :][:piece]
        for plane, piece in enumerate(cache.pieces)
        for block in (8, 2, 5, 1)
    ]
    assert np.array_equal(found, np.concatenate(expected))


def test_the_largest_word_that_everything_is_a_multiple_of() -> None:
    def word(address: int, stride: int, piece: int) -> int:
        region = Region((Plane(address, stride, piece),), 4)
        (part,) = parts(region, region.object_bytes)
        (group,) = groups(region, part)
        return group.word_bytes

    assert word(4096, 4096, 4096) == 16
    assert word(4096, 4096, 4100) == 4
    assert word(4096, 4100, 4096) == 4
    assert word(4100, 4096, 4096) == 4
    assert word(4097, 4096, 4096) == 1


def test_an_array_over_an_address_sees_the_memory_itself() -> None:
    memory = np.arange(24, dtype=np.uint8)
    rows = host_array(memory.ctypes.data + 1, (3, 2), (8, 1))
    assert rows.tolist() == [[1, 2], [9, 10], [17, 18]]
    rows[1] = 0
    assert memory[8:12].tolist() == [8, 0, 0, 11]


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_triton_does_the_same_in_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton-interpreted", __file__]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert " skipped" not in result.stdout.splitlines()[-1]
