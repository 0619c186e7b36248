"""Device code in a CUDA library: which architectures it is for, and how to empty what one GPU never runs.

nvcc puts device code into the ELF section `.nv_fatbin`, as one container after another, each with entries for several
architectures; the driver takes the entry that fits the GPU. A wheel carries eight or so architectures. An entry whose
bytes are zero compresses to nothing, and nothing in the file moves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = b".nv_fatbin"
CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of the entries after it."""
CONTAINER_MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of this header, bytes of the code after it, …, architecture (90: sm_90 or compute_90)."""
PTX, MACHINE_CODE = 1, 2
SECTION_HEADERS = struct.Struct("<Q10xHHH")
"""In an ELF header, from byte 40 on: where the section headers are, …, their size, their number, the names' index."""
SECTION_HEADER = struct.Struct("<IIQQQQ")
"""Name, type, flags, address, offset, size."""


@dataclass(frozen=True, slots=True)
class Code:
    """One entry: its kind, its architecture, and the bytes of the file that hold its code."""

    kind: int
    architecture: int
    start: int
    stop: int


def keep_architecture(library: bytearray, architecture: int) -> int:
    """Zero, in place, all device code of a library that a GPU of `architecture` (90 for sm_90) doesn't run.

    Where a container has no machine code for it, the newest PTX stays that can be compiled for it. Returns the number
    of bytes zeroed; 0 where the library has no device code.
    """
    zeroed = 0
    for container in containers(library):
        fits = [code for code in container if code.kind == MACHINE_CODE and code.architecture == architecture]
        if not fits:
            sources = [code for code in container if code.kind == PTX and code.architecture <= architecture]
            newest = max((code.architecture for code in sources), default=None)
            fits = [code for code in sources if code.architecture == newest]
        for code in container:
            if code not in fits:
                library[code.start : code.stop] = bytes(code.stop - code.start)
                zeroed += code.stop - code.start
    return zeroed


def containers(library: bytes | bytearray) -> Iterator[list[Code]]:
    """The containers of a library, each as its entries. Changes nothing."""
    for at, end in _sections(library, SECTION):
        while at + CONTAINER.size <= end:
            magic, _, header_bytes, entries_bytes = CONTAINER.unpack_from(library, at)
            if magic != CONTAINER_MAGIC:
                at += 8  # padding between two containers
                continue
            at += header_bytes
            stop = at + entries_bytes
            found = []
            while at < stop:
                kind, _, header_bytes, code_bytes, architecture = ENTRY.unpack_from(library, at)
                found.append(Code(kind, architecture, at + header_bytes, at + header_bytes + code_bytes))
                at += header_bytes + code_bytes
            yield found


def _sections(library: bytes | bytearray, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Where the sections of that name begin and end in a 64-bit ELF file; none in any other."""
    if library[:5] != b"\x7fELF\x02":
        return
    table, size, count, names_index = SECTION_HEADERS.unpack_from(library, 40)
    headers = [SECTION_HEADER.unpack_from(library, table + number * size) for number in range(count)]
    names = headers[names_index][4] if headers else 0
    for name, _, _, _, offset, length in headers:
        start = names + name
        if library[start : library.index(0, start)] == wanted:
            yield offset, offset + length
