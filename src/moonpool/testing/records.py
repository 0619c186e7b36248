"""Who owns what in a pool, read from the node's own record file: the same evidence that its restart goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moonpool.folder.folder import Folder
from moonpool.folder.layout import GENERATION_MASK, HEADER_BYTES, INLINE_KEY_BYTES, State
from moonpool.folder.records import KEY_LENGTH_SHIFT, LENGTH_MASK, RECORD_DTYPE, Records

GRANULE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Extent:
    """One record that isn't free. `session` is the writer's number."""

    slot: int
    state: State
    generation: int
    session: int
    offset: int
    size: int
    key: bytes
    """Its first 64 bytes."""

    @property
    def end(self) -> int:
        """The first byte after the extent, in whole granules of the pool."""
        return self.offset + -(-self.size // GRANULE_BYTES) * GRANULE_BYTES


def extents(folder: Path) -> list[Extent]:
    """All occupied records of the pool in `folder`, by offset. Reads the file; changes nothing.

    While a node runs, records may change as they are read: stop it (SIGSTOP will do) for an exact picture.
    """
    path = Folder(folder).records
    identity = Records.identity(path)
    assert identity is not None, f"{path} holds no records of this layout"
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        table = np.frombuffer(file.read(identity.slots * RECORD_DTYPE.itemsize), RECORD_DTYPE)
    found = []
    for slot in np.flatnonzero(table["state"] & 0xFF).tolist():
        row = table[slot]
        word = int(row["state"])
        length = min(int(row["flags"]) >> KEY_LENGTH_SHIFT & LENGTH_MASK, INLINE_KEY_BYTES)
        found.append(
            Extent(
                slot=slot,
                state=State(word & 0xFF),
                generation=word >> 8 & GENERATION_MASK,
                session=word >> 32,
                offset=int(row["offset"]),
                size=int(row["size"]),
                key=row["key"].tobytes()[:length],
            )
        )
    return sorted(found, key=lambda extent: extent.offset)


def overlaps(found: list[Extent]) -> list[tuple[Extent, Extent]]:
    """Pairs of extents that own a byte in common: in a sound pool there are none."""
    pairs = []
    reaching: Extent | None = None
    for extent in found:
        if reaching is not None and extent.offset < reaching.end:
            pairs.append((reaching, extent))
        if reaching is None or extent.end > reaching.end:
            reaching = extent
    return pairs
