"""The demo with vLLM from beginning to end: one engine after the other, then what their answers come to."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec

import moonpool
from moonpool.demo.prompts import prompts
from moonpool.demo.run import WORKER_ENVIRONMENT, DemoFailed, Watch, demo_node
from moonpool.demo.settings import CONTROL_PROMPT, Settings
from moonpool.demo.vllm.settings import ALONE, ENGINES, FIRST, SECOND, Answers, Job, prompts_of
from moonpool.demo.vllm.tamper import CONTROLS
from moonpool.errors import MoonpoolError

TOLERANCE = 1e-3
"""How far apart the logprobs of a token may be. Sums taken in another order put them 1e-5 apart in float32; a wrong
object, of the 24 of a prompt, 0.03 and more."""
ENGINE_TIMEOUT_S = 900.0
"""An engine takes half a minute, most of it to import."""
ENGINE_ENVIRONMENT = WORKER_ENVIRONMENT | {
    # The whole engine in the one process: it is started, timed and ended as one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
DROPPED = ("VLLM_CPU_KVCACHE_SPACE",)
"""Variables that would override what the demo asks for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far answers are from those of the engine without the pool."""

    tokens_differing: int
    tokens_compared: int
    logprobs_off: float
    """The largest difference between two logprobs of one token."""

    @property
    def same(self) -> bool:
        return not self.tokens_differing and self.logprobs_off <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found."""

    settings: Settings
    prompts: int
    prompt_tokens: int
    tolerance: float
    answers: dict[str, Answers]
    """By the name of the engine, or of the control."""
    verdicts: dict[str, Verdict]
    """Likewise, but for the engine that is the reference."""
    trouble: dict[str, str]
    """By the name of the engine, what its connector had to complain of last."""
    url: str
    """The node's, empty for one of the demo's own."""

    @property
    def ratio(self) -> float:
        """How many times sooner engine B gave a first token, on average, than the engine without the pool."""
        alone, second = self.answers[ALONE], self.answers[SECOND]
        return mean(alone.first_token_s) / mean(second.first_token_s)

    def check(self) -> None:
        """Raise `DemoFailed` unless the pool changed no answer, was used, and every control was noticed."""
        for name in (FIRST, SECOND):
            verdict = self.verdicts[name]
            if not verdict.same:
                raise DemoFailed(
                    f"engine {name!r} answers otherwise than one without the pool: {verdict.tokens_differing} of "
                    f"{verdict.tokens_compared} tokens differ, logprobs are up to {verdict.logprobs_off:.3g} apart"
                )
        if not self.answers[FIRST].stored_bytes:
            raise DemoFailed(f"engine A stored nothing, so it proves nothing: {self._trouble(FIRST)}")
        for name in (SECOND, *CONTROLS):
            if not self.answers[name].loaded:
                raise DemoFailed(
                    f"{name}: no token was loaded from the pool, so it proves nothing: {self._trouble(SECOND)}"
                )
        for name in CONTROLS:
            if self.verdicts[name].same:
                raise DemoFailed(f"the comparison doesn't notice {name!r}, so it proves nothing")

    def _trouble(self, name: str) -> str:
        return self.trouble.get(name) or "its connector doesn't say why; is the node's mode on?"


def run_demo(settings: Settings, url: str = "", watch: Watch = lambda what, done, total: None) -> Result:
    """Run the demo against the node at `url`, or against one of its own, and return what it found.

    Three fresh processes, one after the other, each with an engine: without the pool; storing; loading, and trying the
    controls. Leaves nothing behind. Raises `MoonpoolError` when it can't be run, nothing for a bad result: see
    `Result.check`.
    """
    answers: dict[str, Answers] = {}
    trouble: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="moonpool-demo-") as folder, demo_node(settings, url, watch) as node:
        tenant = f"demo-{uuid.uuid4().hex}"
        try:
            for done, name in enumerate(ENGINES):
                watch(f"{name}: a fresh process", done, len(ENGINES))
                store = "" if name == ALONE else node
                controls = list(CONTROLS) if name == SECOND else []
                job = Job(name, settings, folder, prompts_of(settings, name), store, tenant, controls)
                found, trouble[name] = _run_engine(job)
                answers |= found
        finally:
            _purge(node, tenant)
    return result_of(settings, answers, {name: text for name, text in trouble.items() if text}, url)


def result_of(
    settings: Settings, answers: dict[str, Answers], trouble: dict[str, str] | None = None, url: str = ""
) -> Result:
    """Return what these answers come to."""
    asked = prompts(settings)
    return Result(
        settings=settings,
        prompts=len(asked),
        prompt_tokens=sum(map(len, asked)),
        tolerance=TOLERANCE,
        answers=answers,
        verdicts={
            name: _compare(found, answers[ALONE], prompts_of(settings, name) if name in ENGINES else [CONTROL_PROMPT])
            for name, found in answers.items()
            if name != ALONE
        },
        trouble=trouble or {},
        url=url,
    )


def _compare(found: Answers, right: Answers, asked: Sequence[int]) -> Verdict:
    """Compare answers with the reference's, which were to all prompts, in order. Logprobs count up to where tokens
    part: from there on they are those of another text."""
    differing = compared = 0
    off = 0.0
    for place, number in enumerate(asked):
        tokens, expected = found.tokens[place], right.tokens[number]
        compared += len(expected)
        differing += sum(a != b for a, b in zip(tokens, expected, strict=True))
        for own, token, logprob, right_logprob in zip(
            tokens, expected, found.logprobs[place], right.logprobs[number], strict=True
        ):
            if own != token:
                break
            apart = abs(logprob - right_logprob)
            off = max(off, apart if math.isfinite(apart) else math.inf)
    return Verdict(differing, compared, off)


def _run_engine(job: Job) -> tuple[dict[str, Answers], str]:
    """Do `job` in a fresh process and return its answers, and what the connector has said last."""
    log, answers = Path(job.folder) / "log", Path(job.folder) / "answers.json"
    variables = {name: value for name, value in os.environ.items() if name not in DROPPED}
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "moonpool.demo.vllm.engine"],
            input=msgspec.json.encode(job),
            stdout=output,
            stderr=output,
            env={**ENGINE_ENVIRONMENT, **variables},
            timeout=ENGINE_TIMEOUT_S,
        )
    said = log.read_text(errors="replace").strip().splitlines()
    if done.returncode:
        raise MoonpoolError(
            f"the demo's process for engine {job.name!r} failed: {said[-1] if said else f'exit {done.returncode}'}"
        )
    # Warnings of a logger that nobody has set up stand in the log as they are, without a prefix.
    trouble = next((line for line in reversed(said) if line.startswith("moonpool ")), "")
    return msgspec.json.decode(answers.read_bytes(), type=dict[str, Answers]), trouble


def _purge(node: str, tenant: str) -> None:
    """A node that was there before gets its room back."""
    with moonpool.connect(node, name="demo") as client:
        client.purge(tenant=tenant)
