"""The command line run as processes against one node."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COMMAND = [sys.executable, "-m", "moonpool"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}


@dataclass(frozen=True)
class CommandLine:
    """Runs `moonpool` against one node."""

    folder: Path

    @property
    def url(self) -> str:
        return f"unix:{self.folder}"

    def __call__(self, *arguments: str, input: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        environment = {**ENVIRONMENT, "MOONPOOL_URL": self.url}
        return subprocess.run([*COMMAND, *arguments], env=environment, input=input, capture_output=True, timeout=60)

    def ok(self, *arguments: str, input: bytes | None = None) -> bytes:
        """Standard output of a command that must succeed, and say nothing on standard error."""
        done = self(*arguments, input=input)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    def failed(self, *arguments: str, code: int = 1, input: bytes | None = None) -> str:
        """The one line on standard error of a command that must fail."""
        done = self(*arguments, input=input)
        assert done.returncode == code, done.stderr
        line = done.stderr.decode()
        assert line.startswith("error: "), line
        assert line.count("\n") == 1, line
        return line
