"""The demo from beginning to end: processes one after the other, then the verdict over what each came to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

import moonpool
from moonpool.demo.compare import TOLERANCE, Outcome, Verdict, compare, load
from moonpool.demo.node import temporary_node
from moonpool.demo.prompts import prompts
from moonpool.demo.settings import CONTROL_PROMPT, Event, Job, Pass, Settings, Stages
from moonpool.demo.tamper import CONTROLS
from moonpool.errors import ConfigError, MoonpoolError

RECOMPUTE = ("recompute 1", "recompute 2")
IN_PROCESS = ("in-process 1", "in-process 2")
MOONPOOL = ("moonpool 1", "moonpool 2")

WORKER_ENVIRONMENT = {
    # The model is built here: nothing is to be asked for over the network.
    "HF_HUB_OFFLINE": "1",
    # With every core computing, a thread that spins at a barrier keeps the one it waits for from running: beside one
    # busy process on two cores the same prefills took 18 s spinning and 2 s sleeping.
    "OMP_WAIT_POLICY": "passive",
}

Watch = Callable[[str, int, int], None]
"""Called as the demo goes on, with what it is at, prompts done there, and prompts in all."""


class DemoFailed(MoonpoolError):
    """The store changed the result, or the comparison couldn't have told."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found."""

    settings: Settings
    prompts: int
    prompt_tokens: int
    tolerance: float
    stages: dict[str, Stages]
    """By the name of the pass."""
    verdicts: dict[str, Verdict]
    """By the name of the pass, controls included; the reference is the first recompute."""
    url: str
    """The node's, empty for one of the demo's own."""

    @property
    def ratio(self) -> float:
        """How many times sooner the second run through Moonpool had its first tokens than recomputing."""
        return self.stages[RECOMPUTE[1]].seconds / self.stages[MOONPOOL[1]].seconds

    def check(self) -> None:
        """Raise `DemoFailed` unless the store changed nothing, was used, and every control was noticed."""
        for name in (*RECOMPUTE[1:], *IN_PROCESS, *MOONPOOL):
            verdict = self.verdicts[name]
            if not verdict.same:
                raise DemoFailed(
                    f"{name} differs from recomputing without a store: {'; '.join(verdict.reasons)}"
                )
        for name in (IN_PROCESS[1], MOONPOOL[1]):
            stages = self.stages[name]
            if stages.loaded != stages.loadable:
                raise DemoFailed(
                    f"{name} loaded {stages.loaded:,} of {stages.loadable:,} tokens, so it proves nothing: "
                    f"{stages.trouble or 'the store had lost them; give it a larger pool'}"
                )
        for name in CONTROLS:
            if self.verdicts[name].same:
                raise DemoFailed(f"the comparison doesn't notice {name!r}, so it proves nothing")


def run_demo(settings: Settings, url: str = "", watch: Watch = lambda what, done, total: None) -> Result:
    """Run the demo against the node at `url`, or against one of its own, and return what it found.

    Three fresh processes: one recomputes and caches in its own memory, one stores, one loads and tries the negative
    controls. Leaves nothing behind. Raises `MoonpoolError` when it can't be run, nothing for a bad result: see
    `Result.check`.
    """
    with tempfile.TemporaryDirectory(prefix="moonpool-demo-") as folder, demo_node(settings, url, watch) as node:
        embedded = f"embedded:{settings.pool_bytes}"
        tenant = f"demo-{uuid.uuid4().hex}"
        jobs = [
            [*(Pass(name) for name in RECOMPUTE), *(Pass(name, embedded) for name in IN_PROCESS)],
            [Pass(MOONPOOL[0], node)],
            [Pass(MOONPOOL[1], node), *(Pass(name, node, control=name) for name in CONTROLS)],
        ]
        stages: dict[str, Stages] = {}
        total = len(prompts(settings))
        for number, passes in enumerate(jobs):
            last = number == len(jobs) - 1
            stages |= _run_job(Job(settings, folder, tenant, passes, purge=last), watch, total)
        reference = load(Path(folder) / f"{RECOMPUTE[0]}.npz")
        verdicts = {
            name: compare(load(Path(folder) / f"{name}.npz"), _part(reference, name), settings.dtype)
            for name in stages
        }
    return Result(
        settings=settings,
        prompts=total,
        prompt_tokens=sum(map(len, prompts(settings))),
        tolerance=TOLERANCE[settings.dtype],
        stages=stages,
        verdicts=verdicts,
        url=url,
    )


def _part(reference: Sequence[Outcome], name: str) -> Sequence[Outcome]:
    return [reference[CONTROL_PROMPT]] if name in CONTROLS else reference


@contextmanager
def demo_node(settings: Settings, url: str, watch: Watch) -> Iterator[str]:
    """The URL of the node that the demo runs against: the one at `url`, or one of its own until the context ends.

    Raises `MoonpoolError` where there is none at `url`, or processes can't share it.
    """
    if url:
        if url.startswith("embedded"):
            raise ConfigError(
                f"option 'url': {url!r} lives in one process, and the demo's processes share a node"
            )
        moonpool.connect(url).close()  # to learn now, and not after a minute, that there is no node
        yield url
        return
    watch("starting a node", 0, 0)
    with temporary_node(settings.pool_bytes) as own:
        yield own


def _run_job(job: Job, watch: Watch, total: int) -> dict[str, Stages]:
    """Do `job` in a fresh process and return the stages of its passes."""
    watch(f"{job.passes[0].name}: a fresh process loads the model", 0, total)
    stages: dict[str, Stages] = {}
    errors = Path(job.folder) / "stderr"
    with errors.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moonpool.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**WORKER_ENVIRONMENT, **os.environ},
        )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            for line in process.stdout:
                event = msgspec.json.decode(line, type=Event)
                if event.failed:
                    raise MoonpoolError(event.failed)
                if event.finished is not None:
                    stages[event.finished.name] = event.finished
                watch(event.working, event.prompts_done, 1 if event.working in CONTROLS else total)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = errors.read_text(errors="replace").strip().splitlines() or [f"exit {process.returncode}"]
        raise MoonpoolError(f"the demo's process for {job.passes[0].name!r} failed: {said[-1]}")
    return stages
