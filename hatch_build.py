"""Builds the streaming copy (src/moonpool/client/streaming.c) at install, where there is a C compiler.

Without one the package is the same but for that library: `moonpool.client.streaming` then copies with numpy.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "src/moonpool/client/streaming.c"
LIBRARY = "src/moonpool/client/_streaming.so"
# Nothing for this one processor: what the source needs beyond x86-64 it chooses when it runs.
OPTIONS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")


class StreamingHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library to the wheel, or says in one line why there is none."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root, LIBRARY)
        said = compile_library(Path(self.root, SOURCE), library)
        if said:
            library.unlink(missing_ok=True)  # an earlier build's must not pass for this one's
            self.app.display_warning(f"no streaming copy, copies go through numpy: {said}")
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def compile_library(source: Path, library: Path, options: Sequence[str] = ()) -> str:
    """Compile `source` into `library` with `$CC`, else cc. Returns "", or why there is no library; raises nothing."""
    if platform.machine() != "x86_64":
        return f"it is for x86-64, not for {platform.machine()}"
    command = shlex.split(os.environ.get("CC") or "cc")
    # Put in place whole: a process may have the earlier one mapped.
    made = library.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run([*command, *OPTIONS, *options, "-o", made, source], check=True, capture_output=True, text=True)
        made.replace(library)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return f"{command[0]} ended with {error.returncode}" + (f", {lines[0]}" if lines else "")
    finally:
        made.unlink(missing_ok=True)
    return ""
