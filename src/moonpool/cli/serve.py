"""`moonpool serve`: the node daemon in the foreground."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from moonpool.cli.base import progress, set_up_logging
from moonpool.errors import ConfigError
from moonpool.options import OPTIONS
from moonpool.sizes import format_bytes

if TYPE_CHECKING:
    from moonpool.config import NodeConfig
    from moonpool.node.daemon import Progress


def _flag(name: str, metavar: str, default: str) -> Any:
    option = OPTIONS[name]
    text = f"{option.help[0].upper()}{option.help[1:]}. Default: {default}."
    return typer.Option(option.flag, metavar=metavar, help=text, show_default=False)


def serve(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(metavar="URL", help="unix:PATH is the same as --dir PATH.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A TOML file with these options. Default: $MOONPOOL_CONFIG."),
    ] = None,
    dir: Annotated[str | None, _flag("dir", "PATH", "/dev/shm/moonpool-UID")] = None,
    pool: Annotated[str | None, _flag("pool", "SIZE", "half of what is free")] = None,
    slots: Annotated[str | None, _flag("slots", "COUNT", "one for each 16 KiB of pool, 65,536 to 4,194,304")] = None,
    metrics: Annotated[str | None, _flag("metrics", "ADDRESS", "none")] = None,
    folder_mode: Annotated[str | None, _flag("folder_mode", "OCTAL", "0700")] = None,
    group: Annotated[str | None, _flag("group", "GROUP", "the user's own")] = None,
    reserve_wait: Annotated[str | None, _flag("reserve_wait", "TIME", "100ms, at most 5s")] = None,
    pin_share: Annotated[str | None, _flag("pin_share", "SHARE", "0.5")] = None,
    checksum_share: Annotated[str | None, _flag("checksum_share", "SHARE", "0.1")] = None,
    nice: Annotated[str | None, _flag("nice", "NICE", "-10")] = None,
    scrub_interval: Annotated[str | None, _flag("scrub_interval", "TIME", "1h")] = None,
    reconnect_grace: Annotated[str | None, _flag("reconnect_grace", "TIME", "60s")] = None,
    log_level: Annotated[str | None, _flag("log_level", "LEVEL", "warning")] = None,
    mode: Annotated[str | None, _flag("mode", "MODE", "on")] = None,
    name: Annotated[str | None, _flag("name", "NAME", "the host's")] = None,
    feed_events: Annotated[str | None, _flag("feed_events", "COUNT", "65,536")] = None,
    prefault: Annotated[
        bool | None, typer.Option("--prefault/--no-prefault", help="Touch the pool's memory in the background.")
    ] = None,
) -> None:
    """Run this host's node, which owns the pool that all engines on the host share.

    It runs until SIGTERM or Ctrl-C, serves at once and touches the pool's memory in the background. Every option can
    also be set by an environment variable (MOONPOOL_POOL for --pool) or in a TOML file; flags win over variables, and
    those over the file.

    Examples:
      moonpool serve
      moonpool serve --pool 48GiB --metrics 127.0.0.1:9400
      moonpool serve --dir /dev/shm/engines --folder-mode 0770 --group engines
      moonpool serve --config /etc/moonpool.toml
    """
    given = {option: context.params[option] for option in OPTIONS}
    given["prefault"] = None if prefault is None else str(prefault).lower()
    if url is not None:
        given["dir"] = _folder_of(url, given["dir"])
    from moonpool.config import load_config

    settings = load_config(given, os.environ, config)
    set_up_logging(settings.log_level)
    from moonpool.node.daemon import run

    with ExitStack() as stack:
        run(settings, on_progress=_Preparing(settings, stack).report)


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command()(serve)


def opening_line(config: NodeConfig, recovered: int) -> str:
    """What is served, and what bound the pool's size where it was computed."""
    pool = format_bytes(config.pool_bytes, binary=True)
    origin = config.origins.get("pool", "")
    why = f" ({origin})" if origin.startswith("default") else ""
    metrics = f", metrics at http://{config.metrics}/metrics" if config.metrics else ""
    found = f", {recovered:,} objects found" if recovered else ""
    return f"moonpool: node {config.name} serves {config.dir}, pool {pool}{why}, {config.slots:,} slots{metrics}{found}"


def _folder_of(url: str, folder: str | None) -> str:
    """`serve --url unix:PATH` is `serve --dir PATH`, so that one URL serves and connects."""
    scheme, _, path = url.partition(":")
    if scheme != "unix" or not path:
        raise ConfigError(f"option 'url': a node serves unix:PATH, not {url!r}")
    path = path.removesuffix("/node.sock")
    if folder is not None and os.path.abspath(folder) != os.path.abspath(path):
        raise ConfigError(f"options 'url' and 'dir' name two folders, {path} and {folder}; give one of them")
    return path


class _Preparing:
    """Says that the node serves, then how far the work on its memory is, one bar a stage, until `stack` or it ends."""

    LABELS: ClassVar = {"reserve": "reserving the pool's memory", "touch": "touching the pool's memory"}

    def __init__(self, config: NodeConfig, stack: ExitStack) -> None:
        self._config, self._stack = config, stack
        self._stage = ""
        self._shown_bytes = 0
        self._advance: Callable[[int], None] = lambda count: None

    def report(self, at: Progress) -> None:
        """Called by the node, also from another thread: never raises, never waits."""
        if at.stage != self._stage:
            self._stack.close()
            self._stage, self._shown_bytes = at.stage, 0
            if at.stage == "serving":
                print(opening_line(self._config, at.recovered), file=sys.stderr)
            label = self.LABELS.get(at.stage)
            if label is None:
                self._advance = lambda count: None
            else:
                self._advance = self._stack.enter_context(progress(label, at.total_bytes))
        self._advance(at.done_bytes - self._shown_bytes)
        self._shown_bytes = at.done_bytes
