"""The connector's tie to the pool: made when a node is there, given up after failures, never an exception."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import moonpool
from moonpool.errors import IntegrityError, MoonpoolError, NodeUnavailable
from moonpool.keys import KeySpace

log = logging.getLogger("moonpool.vllm")


class Pool:
    """One side's client of the pool. For the engine's own thread, but for `failed`, which any thread may call.

    With no node it is simply not `usable`, until there is one. After `failures_max` failures in a row it is left alone
    for `retry_s`; after an integrity error for good.
    """

    def __init__(
        self,
        url: str | None,
        name: str,
        *,
        failures_max: int,
        retry_s: float,
        prefault: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_max, self._retry_s, self._clock = failures_max, retry_s, clock
        self._failures = 0
        self._off_until = 0.0
        self._declared: tuple[bytes, bytes] | None = None
        self.off = ""
        """Why it is off for good, "" where it isn't."""
        self.client = moonpool.connect(url, name=name, required=False, prefault=prefault)

    def usable(self) -> bool:
        """Whether there is a node to ask, and reason to. Microseconds."""
        if self.off or (self._off_until and self._clock() < self._off_until):
            return False
        return self.client.link.connected

    def declare(self, spaces: list[KeySpace]) -> None:
        """Tell the node what its keys will mean; once a pool: a fresh one knows nothing. Raises `MoonpoolError`."""
        known_as = self.client.link.attachment.pool_id, b"".join(space.digest for space in spaces)
        if known_as == self._declared:
            return
        for space in spaces:
            self.client.declare(space)
        self._declared = known_as

    def succeeded(self) -> None:
        """Something worked: earlier failures no longer count."""
        self._failures = 0
        self._off_until = 0.0

    def failed(self, error: BaseException | str) -> None:
        """Something didn't. A node that isn't there counts as nothing: the client finds the next by itself."""
        if isinstance(error, NodeUnavailable):
            return
        if isinstance(error, IntegrityError):
            self.turn_off(f"stored bytes can't be trusted: {error}")
            return
        self._failures += 1
        if self._failures >= self._failures_max:
            self._off_until = self._clock() + self._retry_s
            self._failures = 0
            log.warning("moonpool is left alone for %g s after failures in a row; the last: %s", self._retry_s, error)

    def turn_off(self, why: str) -> None:
        """Off until the engine is started anew."""
        if not self.off:
            self.off = why
            log.error("moonpool is off, the engine goes on without it: %s", why)

    def close(self) -> None:
        """End the session. Nothing may be reading or writing the pool on its behalf any more."""
        try:
            self.client.close()
        except MoonpoolError as error:
            log.info("closing: %s", error)
