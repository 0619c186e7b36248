"""Client processes that the fault tests start, watch and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from moonpool.testing.node import innermost

END_S = 30.0


def environment(test: str = "") -> dict[str, str]:
    """This process's variables without ours; `test` is what `MOONPOOL_TEST` says."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
    return {**found, "MOONPOOL_TEST": test} if test else found


def python(
    code: str, *arguments: str, test: str = "", prefix: Sequence[str] = (), extra: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A Python process that runs `code`, with `arguments` in `sys.argv[1:]`. Its output can be read line by line."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(test), **(extra or {})},
    )


def in_child(call: Callable[[], object]) -> int:
    """Run `call` in a forked child; its exit status, 0 when nothing was raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def load(url: str, seed: int, *, test: str = "", steps: int = 0) -> subprocess.Popen[str]:
    """A `moonpool.testing.load` process, which says "ready" once it has connected."""
    return subprocess.Popen(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "moonpool.testing.load",
            url,
            "--seed",
            str(seed),
            "--steps",
            str(steps),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(test),
    )


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process is gone, and its pipes closed, after the context."""
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(innermost(process.pid), signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()


def stacks(process: subprocess.Popen[str]) -> str:
    """End a process that was started with `-X faulthandler`, and tell where all its threads were."""
    process.send_signal(signal.SIGABRT)
    return process.communicate(timeout=END_S)[1]


def said(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints, without its end; AssertionError with its errors where it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait(END_S)
        assert process.stderr is not None
        raise AssertionError(f"the process ended with {process.returncode}:\n{process.stderr.read()}")
    return line.rstrip("\n")


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """Send the process a line."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def kill(process: subprocess.Popen[str]) -> None:
    """End the process as `kill -9` does, and reap it."""
    os.kill(innermost(process.pid), signal.SIGKILL)
    process.wait(END_S)
