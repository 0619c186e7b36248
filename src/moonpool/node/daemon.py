"""`moonpool serve`: one node as a process, from taking the folder's lock to a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import uvloop

from moonpool.config import NodeConfig, check_fits
from moonpool.errors import ConfigError, FolderError
from moonpool.folder.folder import Folder
from moonpool.folder.mapping import TOUCH_CHUNK_BYTES, reserve_file
from moonpool.folder.records import Records
from moonpool.node.node import Node, open_node
from moonpool.node.scheduling import prefer_latency
from moonpool.node.server import ChecksumProcess, Server
from moonpool.observe.http import MetricsServer

log = logging.getLogger("moonpool.node")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the background work on the pool is; given to `run`'s `on_progress`."""

    stage: str
    """"serving" once clients can connect, then "reserve" and "touch", at last "ready"."""
    done_bytes: int
    total_bytes: int
    recovered: int = 0
    """Objects that were found at a restart."""


Report = Callable[[Progress], None]

RESERVE_CHUNK_BYTES = 256 << 20
"""Reserved at a time: some 75 ms, after which the node may hand it out."""


def _allow_descriptors() -> None:
    """As many file descriptors as the system lets us have: its default of 1,024 is for programs that use `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(config: NodeConfig, on_progress: Report | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises `MoonpoolError` where it can't start; leaves the pool for the next node.

    `on_progress` is called from a background thread.
    """
    _allow_descriptors()
    folder = Folder(config.dir)
    folder.create(config.folder_mode, config.group)
    lock = folder.take_lock()
    try:
        config = _as_before(config, folder)
        check_fits(config.pool_bytes, config.dir)  # what a pool in the folder takes counts as free
        warnings: list[str] = []
        node = open_node(config, folder, warnings)
        for warning in warnings:
            log.warning("%s", warning)
        gc.freeze()
        prefer_latency(config.nice)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, folder, node, on_progress or (lambda progress: None)))
    finally:
        os.close(lock)


def _as_before(config: NodeConfig, folder: Folder) -> NodeConfig:
    """Sizes that nobody chose stay those of the pool that is there: what is free now doesn't count what it takes."""
    identity = Records.identity(folder.records)
    if identity is None or not config.origins.get("pool", "").startswith("default"):
        return config
    config = msgspec.structs.replace(config, pool_bytes=identity.pool_bytes)
    if config.origins.get("slots") == "default":
        config = msgspec.structs.replace(config, slots=identity.slots)
    return config


async def _serve(config: NodeConfig, folder: Folder, node: Node, report: Report) -> None:
    loop = asyncio.get_running_loop()
    server = Server(node, loop)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server.listen(folder, config.folder_mode, config.group)
    checksums = ChecksumProcess(server, folder, config.checksum_share)
    checksums.start()
    metrics = MetricsServer(server)
    if config.metrics is not None:
        await metrics.start(config.metrics.host, config.metrics.port)
    report(Progress("serving", 0, config.pool_bytes, node.recovered))
    preparation = Preparation(config, folder, server, report)
    preparation.start()

    def replace() -> None:
        """A process that is silent and lives holds the old pool: leave it to that, and go on with a fresh one.

        The one thing for which the loop stands still: 0.2 s for each million slots, and up to 0.1 s until the thread
        that sets memory aside has noticed. Writers were refused for as long as the grace, every client has to come anew
        afterwards, and none may meanwhile be told of one pool and find the other's files.
        """
        nonlocal preparation
        try:
            check_fits(config.pool_bytes, config.dir)
        except ConfigError as error:
            server.on_stuck = None
            log.error("silent sessions hold the pool, and there is no memory for a second one: %s", error)
            return
        names = ", ".join(session.name for session in server.node.roster.silent)
        log.warning("%s did not come back within %.0f s: starting a fresh pool", names, config.reconnect_grace_s)
        preparation.stop()
        checksums.stop(wait=False)
        folder.forget()
        fresh = open_node(config, folder, [])
        earlier = server.node
        fresh.set_mode(earlier.mode)
        server.use(fresh)
        earlier.close()
        checksums.start()
        preparation = Preparation(config, folder, server, report)
        preparation.start()

    server.on_stuck = replace
    try:
        await stop.wait()
    finally:
        preparation.stop()
        await metrics.stop()
        server.stop()
        checksums.stop()
        folder.socket.unlink(missing_ok=True)
        await asyncio.sleep(0.05)  # let the closing connections send what is queued


class Preparation(threading.Thread):
    """Sets the pool's memory aside chunk by chunk (the node hands out each as it comes), then faults it in."""

    def __init__(self, config: NodeConfig, folder: Folder, server: Server, report: Report) -> None:
        super().__init__(name="moonpool-prepare", daemon=True)
        self.config, self.folder, self.server, self.report = config, folder, server, report
        self.node = server.node
        self._stopping = threading.Event()

    def run(self) -> None:
        total = self.config.pool_bytes
        fd = os.open(self.folder.pool, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for start in range(0, total, RESERVE_CHUNK_BYTES):
                end = min(total, start + RESERVE_CHUNK_BYTES)
                reserve_file(fd, start, end - start, self.folder.pool)
                if self._stopping.is_set():
                    return
                self.server.loop.call_soon_threadsafe(self.server.measured, self.node.grow, end)
                self.report(Progress("reserve", end, total))
            if self.config.prefault:
                self._touch(total)
            self.report(Progress("ready", total, total, self.node.recovered))
        except FolderError as error:
            log.error("%s; the pool stays at %d bytes", error, self.node.reserved_bytes)
            self.node.store.growing = False
        finally:
            os.close(fd)

    def _touch(self, total: int) -> None:
        for start in range(0, total, TOUCH_CHUNK_BYTES):
            if self._stopping.is_set():
                return
            end = min(total, start + TOUCH_CHUNK_BYTES)
            if not self.node.pool.touch(start, end - start):
                log.info("this kernel can't fault memory in ahead of use; the first writes will be slower")
                return
            self.node.touched_bytes = end
            self.report(Progress("touch", end, total))

    def stop(self) -> None:
        """Have it end at the next chunk, and wait for that."""
        self._stopping.set()
        self.join(5)
