"""Gather and scatter in Triton: one launch for all planes and blocks of a slot.

The grid is small and each program loops: moving several times as fast as the wire, the copy takes a fraction of the
multiprocessors, for a fraction of the time, from the model that is running beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from moonpool.errors import MoonpoolError
from moonpool.gpu.kernels import Group, Ids, Launch
from moonpool.gpu.mover import Plane

Grid = tuple[int, int, int]

PROGRAMS = 32
"""Of an H200's 132 multiprocessors, for some 50 µs per slot of 32 MiB."""
TILE_BYTES = 32 << 10
"""What a program moves at once: enough in flight to make up for the memory's latency of some 600 ns."""
WARPS = 16


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["table", "ids", "slot", "rows", "planes", "blocks", "tiles", "part_bytes", "piece_words"]
)
def move_blocks(
    table: tl.int64,
    ids: tl.int64,
    slot: tl.int64,
    rows: tl.int32,
    planes: tl.int32,
    blocks: tl.int32,
    tiles: tl.int32,
    part_bytes: tl.int64,
    piece_words: tl.int32,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Copy `rows` rows of WIDTH words of WORD bytes, ROWS at a time: every piece is `tiles` rows, the last one partly
    filled. Rows are ordered as the slot is: object, plane, block, tile. ALIGN words are copied as one."""
    if WORD == 8:
        word = tl.int64
    elif WORD == 4:
        word = tl.int32
    else:
        word = tl.int8
    # Arguments are plain addresses: whose tensor the memory belongs to is no concern of this kernel.
    planes_at = table.to(tl.pointer_type(tl.int64))
    ids_at = ids.to(tl.pointer_type(tl.int64))
    column = tl.arange(0, WIDTH)
    first = tl.program_id(0) * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)
        inside = row < rows
        tile = row % tiles
        piece = row // tiles
        block = piece % blocks
        plane = piece // blocks % planes
        item = piece // blocks // planes
        number = tl.load(ids_at + item * blocks + block, mask=inside, other=-1)
        address = tl.load(planes_at + plane)
        stride = tl.load(planes_at + planes + plane)
        start = tl.load(planes_at + 2 * planes + plane)
        offset = tile.to(tl.int64) * (WIDTH * WORD)
        there = address + number * stride + offset
        here = slot + item.to(tl.int64) * part_bytes + start + block.to(tl.int64) * piece_words * WORD + offset
        # Masked in units of ALIGN words, so that the compiler sees that a unit is copied whole or not at all.
        left = piece_words // ALIGN - tile * (WIDTH // ALIGN)
        mask = (inside & (number >= 0))[:, None] & ((column // ALIGN)[None, :] < left[:, None])
        there_at = there.to(tl.pointer_type(word))[:, None] + column[None, :]
        here_at = here.to(tl.pointer_type(word))[:, None] + column[None, :]
        there_at = tl.max_contiguous(tl.multiple_of(there_at, [WORD * ALIGN, WORD * ALIGN]), [1, ALIGN])
        here_at = tl.max_contiguous(tl.multiple_of(here_at, [WORD * ALIGN, WORD * ALIGN]), [1, ALIGN])
        if GATHER:
            tl.store(here_at, tl.load(there_at, mask=mask), mask=mask)
        else:
            tl.store(there_at, tl.load(here_at, mask=mask), mask=mask)
        first += tl.num_programs(0) * ROWS


class TritonKernels:
    """Launches `move_blocks`. `upload` brings a table to the device and returns what keeps it there, with a
    `data_ptr()`. For the device that is current in the thread that prepares."""

    name = "triton"

    def __init__(self, upload: Callable[[Ids], Any], programs: int = PROGRAMS) -> None:
        self._upload, self._programs = upload, programs
        self.way = "through its interpreter" if _interpreted() else "as compiled"

    def prepare(self, group: Group, *, gather: bool) -> Launch:
        word_bytes = group.word_bytes
        word, align = (8, 2) if word_bytes == 16 else (word_bytes, 1)
        piece_words = group.piece_bytes // word
        width = min(triton.next_power_of_2(piece_words), TILE_BYTES // word)
        tiles = -(-piece_words // width)
        constants = (word, align, TILE_BYTES // word // width, width, gather)
        table = self._upload(group.table())
        planes, blocks, part_bytes = len(group.planes), group.blocks, group.part_bytes
        rows = planes * blocks * tiles
        shape = (planes, blocks, tiles, part_bytes, piece_words, *constants)
        run = self._launcher(table.data_ptr(), shape)

        def launch(slot: int, ids: Ids, ids_address: int, stream: int) -> None:
            run(table.data_ptr(), ids_address, slot, len(ids) * rows, *shape, stream=stream)

        return launch

    def _launcher(self, table: int, shape: tuple[int, ...]) -> Callable[..., None]:
        """`move_blocks` for these constants, at the least cost a launch that this Triton allows."""
        grid = (self._programs, 1, 1)
        if _interpreted():
            return lambda *arguments, stream: move_blocks[grid](*arguments)
        options = {"num_warps": WARPS}
        compiled = move_blocks.warmup(table, table, table, 0, *shape, grid=grid, **options)
        try:
            # The compiled kernel itself: a quarter of the time that binding and looking it up takes at each launch.
            run: Callable[..., None] = compiled[grid]
            run(table, table, table, 0, *shape, stream=0)
        except (TypeError, AttributeError):
            self.way = "by name"
            return lambda *arguments, stream: _launch_by_name(grid, arguments, options, stream)
        return run

    def try_out(self, device: Any) -> None:
        """Move a few blocks and look at them. Raises `MoonpoolError` where they aren't what they should be, and
        whatever the compiler raises."""
        import torch

        blocks = torch.arange(8 * 64, dtype=torch.uint8, device=device).view(8, 64)
        slot = torch.zeros(3 * 64, dtype=torch.uint8, device=device)
        ids = torch.tensor([[5, -1, 2]], dtype=torch.int64, device=device)
        group = Group((Plane(blocks.data_ptr(), 64, 64),), (0,), 3, 3 * 64)
        stream = torch.cuda.current_stream(device).cuda_stream if blocks.is_cuda else 0
        self.prepare(group, gather=True)(slot.data_ptr(), ids.cpu().numpy(), ids.data_ptr(), stream)
        moved = slot.view(3, 64)
        if not (torch.equal(moved[0], blocks[5]) and not moved[1].any() and torch.equal(moved[2], blocks[2])):
            raise MoonpoolError("the kernel has moved other bytes than it was told to")


def _launch_by_name(grid: Grid, arguments: tuple[int, ...], options: dict[str, int], stream: int) -> None:
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        move_blocks[grid](*arguments, **options)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
