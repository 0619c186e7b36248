"""A pool that a client is attached to, as a CUDA device's mover sees it: registered, and given back with the mover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.client.attachment import Attachment
from moonpool.gpu.device import STAGING_BYTES, DeviceMover
from moonpool.gpu.mover import Region
from moonpool.gpu.registration import Registration


class PoolMover(DeviceMover):
    """A device's mover that owns the registration of its pool: `close()` ends both."""

    def __init__(
        self, attachment: Attachment, regions: Sequence[Region], device: Any, staging_bytes: int = STAGING_BYTES
    ) -> None:
        """Begin to register the pool; copies are slower until that is done. Raises as `DeviceMover` does."""
        self.registration = Registration.of(attachment, device=getattr(device, "index", None) or 0)
        try:
            super().__init__(attachment.pool, regions, self.registration, device, staging_bytes)
        except BaseException:
            self.registration.close()
            raise

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the pool is registered. False where that takes longer, or was refused."""
        return self.registration.done.wait(timeout_s) and self.registration.refused is None

    def close(self) -> None:
        super().close()
        if not self.hung:
            self.registration.close()
