"""Which of the engine's blocks stores are still reading, so that nobody writes to one before.

The engine takes a finished request's blocks back at once: to keep them until they are read would leave a full KV cache
with fewer blocks, and its steps with fewer tokens, than without the pool. They are guarded where they are written to
next: the step that does so waits until the stores in question have read them, which by then they nearly always have.
"""

from __future__ import annotations

from collections.abc import Iterable


class Reading:
    """Blocks under stores, by the save that reads them. For the scheduler's thread; block ids are the engine's."""

    def __init__(self) -> None:
        self._save_of: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._due: set[int] = set()

    def began(self, number: int, blocks: Iterable[int]) -> None:
        """Save `number` reads these."""
        self._blocks[number] = found = tuple(blocks)
        self._save_of.update(dict.fromkeys(found, number))

    def ended(self, number: int) -> None:
        """It doesn't any more, on any rank."""
        for block in self._blocks.pop(number, ()):
            if self._save_of.get(block) == number:
                del self._save_of[block]
        self._due.discard(number)

    def writes(self, blocks: Iterable[int]) -> None:
        """These are written to from the next step on."""
        if self._save_of:
            self._due.update(self._save_of[block] for block in self._save_of.keys() & set(blocks))

    def writes_anywhere(self) -> None:
        """It isn't known which blocks the next step writes to."""
        self._due.update(self._blocks)

    def take_due(self) -> frozenset[int]:
        """Saves that must have been read before the step that is built now does anything."""
        due, self._due = frozenset(self._due), set()
        return due
