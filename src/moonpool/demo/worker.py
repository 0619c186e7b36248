"""What a fresh process of the demo does: load the model, run its passes, write outcomes, report times.

Run as `python -m moonpool.demo.worker` with a `Job` as JSON on standard input; answers with an `Event` a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

import moonpool
from moonpool.demo.compare import Outcome, save
from moonpool.demo.model import build_model
from moonpool.demo.prompts import prompts
from moonpool.demo.settings import CONTROL_PROMPT, Event, Job, Pass, Stages
from moonpool.demo.tamper import TamperingClient
from moonpool.engines.transformers import Prefill, PrefixCache, Report
from moonpool.engines.transformers.support import CACHE_ARGUMENT, empty_cache
from moonpool.errors import MoonpoolError

Tell = Callable[[Event], None]


class Step(NamedTuple):
    """One prompt's prefill, and the time until its first token could be chosen."""

    prefill: Prefill
    seconds: float
    report: Report | None


class Worker:
    """One process's model and prompts, and the passes over them."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job, self._tell = job, tell
        self._model = build_model(job.settings)
        self._prompts = prompts(job.settings)
        self._clients: dict[str, Any] = {}
        self._warm_up()

    def run(self) -> None:
        """Run all passes, in order."""
        cache = None
        for part in self._job.passes:
            self._tell(Event(working=part.name))
            cache = self._cache(part) if part.url else None
            outcomes, stages = self._run_pass(part, cache)
            save(Path(self._job.folder) / f"{part.name}.npz", outcomes)
            self._tell(Event(working=part.name, finished=stages))
        if cache is not None and self._job.purge:
            cache.client.purge(space=cache.space.digest)
        for client in self._clients.values():
            client.close()

    def _run_pass(self, part: Pass, cache: PrefixCache | None) -> tuple[list[Outcome], Stages]:
        chosen = [self._prompts[CONTROL_PROMPT]] if part.control else self._prompts
        outcomes, steps = [], []
        for index, tokens in enumerate(chosen):
            step = self._prefill(tokens) if cache is None else self._prefill_through(cache, tokens)
            outcomes.append(self._go_on(tokens, step.prefill))
            # Not kept whole: every prompt's KV cache at once would be a gigabyte.
            steps.append(step._replace(prefill=Prefill(None, None)))
            self._tell(Event(working=part.name, prompts_done=index + 1))
        return outcomes, self._stages(part, chosen, steps)

    def _prefill(self, tokens: list[int]) -> Step:
        """Recompute: what the model does by itself, with nothing of ours in the way."""
        began = time.perf_counter()
        cache = empty_cache(self._model)
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}
            )
        return Step(Prefill(cache, output.logits[:, -1]), time.perf_counter() - began, None)

    def _prefill_through(self, cache: PrefixCache, tokens: list[int]) -> Step:
        began = time.perf_counter()
        prefill = cache.prefill(tokens)
        return Step(prefill, time.perf_counter() - began, cache.last)

    def _go_on(self, tokens: list[int], prefill: Prefill) -> Outcome:
        """Generate from a prompt's KV cache, and keep what is compared. Uses the cache up."""
        kv = self._projected(prefill.past_key_values)
        first = int(prefill.logits[0].argmax())
        settings = self._job.settings
        output = self._model.generate(
            torch.tensor([[*tokens, first]]),
            max_new_tokens=settings.generated - 1,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **{CACHE_ARGUMENT: prefill.past_key_values},
        )
        logits = torch.cat([prefill.logits, *output.logits]).float().numpy()
        return Outcome(output.sequences[0, len(tokens) :].tolist(), logits, kv)

    def _projected(self, cache: Any) -> Any:
        settings = self._job.settings
        shape = (settings.kv_heads, settings.hidden // settings.heads)
        weights = torch.from_numpy(
            np.random.default_rng(settings.seed).standard_normal(shape, dtype=np.float32)
        )
        parts = [part[0].float() for layer in cache.layers for part in (layer.keys, layer.values)]
        return (
            torch.stack([torch.einsum("htd,hd->t", part, weights) for part in parts])
            .unflatten(0, (-1, 2))
            .numpy()
        )

    def _stages(self, part: Pass, chosen: list[list[int]], steps: list[Step]) -> Stages:
        reports = [step.report for step in steps if step.report is not None]
        seconds = sum(step.seconds for step in steps)
        size = self._job.settings.tokens_per_object
        totals: dict[str, Any] = {
            name: sum(getattr(report, name) for report in reports)
            for name in (
                "query_s",
                "load_s",
                "compute_s",
                "store_s",
                "loaded",
                "stored",
                "bytes_loaded",
                "bytes_stored",
            )
        }
        if not reports:
            totals["compute_s"] = seconds
        return Stages(
            name=part.name,
            seconds=seconds,
            tokens=sum(map(len, chosen)),
            loadable=sum((len(tokens) - 1) // size * size for tokens in chosen),
            trouble=next((report.trouble for report in reports if report.trouble), ""),
            **totals,
        )

    def _cache(self, part: Pass) -> PrefixCache:
        settings = self._job.settings
        client = self._clients.get(part.url)
        if client is None:
            client = self._clients[part.url] = moonpool.connect(part.url, name="demo")
        cache = PrefixCache(
            self._model,
            client,
            tokens_per_object=settings.tokens_per_object,
            tenant=self._job.tenant,
            model_name="moonpool-demo",
        )
        if part.control:
            other = cache.keys(self._prompts[CONTROL_PROMPT + settings.questions][:-1])
            tampering: Any = TamperingClient(client, part.control, settings.layers, other)
            cache.client = tampering
        return cache

    def _warm_up(self) -> None:
        # The first pass through torch's kernels allocates and chooses them; no store is to blame or to thank for it.
        self._go_on(self._prompts[0], self._prefill(self._prompts[0]).prefill)


def main() -> None:
    """Do the job on standard input."""

    def tell(event: Event) -> None:
        print(msgspec.json.encode(event).decode(), flush=True)

    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        Worker(job, tell).run()
    except MoonpoolError as error:
        tell(Event(failed=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
