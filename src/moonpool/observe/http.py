"""`/metrics`, `/healthz` and `/readyz`, served from the node's own loop in steps that don't hold it up."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from moonpool.errors import ConfigError
from moonpool.observe.metrics import exposition

if TYPE_CHECKING:
    from moonpool.node.server import Server

REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
SCRAPES_MAX = 8
"""Scrapes at a time; further ones get 503, so that a misconfigured scraper can't slow the node."""


class MetricsServer:
    """A very small HTTP server: GET of three paths, one request a connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._listener: asyncio.Server | None = None
        self._scrapes = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `ConfigError` where the address can't be had."""
        try:
            self._listener = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            raise ConfigError(
                f"option 'metrics': {host}:{port} can't be listened on: {error.strerror or error}"
            ) from error

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b" ")
                path = rest.split(b" ", 1)[0].split(b"?", 1)[0].decode(errors="replace")
                status, kind, body = await self._answer(method, path)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + (b"" if method == b"HEAD" else body)
                )
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, method: bytes, path: str) -> tuple[str, str, bytes]:
        text = "text/plain; charset=utf-8"
        if method not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", text, b"only GET\n"
        if path == "/healthz":
            return "200 OK", text, b"ok\n"
        if path == "/readyz":
            node = self.server.node
            if node.reserved_bytes < node.config.pool_bytes:
                return "503 Service Unavailable", text, f"reserving: {node.reserved_bytes} bytes so far\n".encode()
            return "200 OK", text, b"ready\n"
        if path != "/metrics":
            return "404 Not Found", text, b"paths: /metrics /healthz /readyz\n"
        if self._scrapes >= SCRAPES_MAX:
            return "503 Service Unavailable", text, b"too many scrapes at a time\n"
        self._scrapes += 1
        try:
            parts: list[bytes] = []
            rendering = exposition(self.server.node)
            while (part := self.server.measured(next, rendering, None)) is not None:
                parts.append(part)
                await asyncio.sleep(0)  # clients come in between
            return "200 OK", CONTENT_TYPE_LATEST, b"".join(parts)
        finally:
            self._scrapes -= 1
