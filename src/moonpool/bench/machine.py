"""What a result was measured on: without it a figure says nothing."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np


def machine(arguments: Sequence[str]) -> dict[str, str | int | float]:
    """Name the machine, the software and the command (`arguments` as given after `moonpool`). Changes nothing."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "moonpool": moonpool_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["moonpool", *arguments]),
        "load_average": round(os.getloadavg()[0], 2),
    }


def moonpool_version() -> str:
    """The installed version, or "source" where the package isn't installed."""
    try:
        return version("moonpool")
    except PackageNotFoundError:
        return "source"


def own_arguments() -> list[str]:
    """The arguments of this process as its user wrote them."""
    return sys.argv[1:]


def available_bytes() -> int:
    """Memory that can be taken now without pushing anything out."""
    return int((_field("/proc/meminfo", "MemAvailable") or "0 kB").split()[0]) * 1024


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
