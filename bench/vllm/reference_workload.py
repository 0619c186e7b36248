"""The reference workload, once, in one process and one mode: 32 prompts of 10,000 tokens, answered with one token each,
and the same 32 again, by a model of Llama-3.1-8B's shape whose KV cache is too small to help the second time.

    python bench/vllm/reference_workload.py baseline                    # no connector: every run recomputes
    python bench/vllm/reference_workload.py native                      # vLLM's own offloading to CPU memory
    python bench/vllm/reference_workload.py moonpool --url unix:/dev/shm/moonpool
    python bench/vllm/reference_workload.py MODULE:CLASS --extra-config '{"key": "value"}'
    python bench/vllm/reference_workload.py baseline --model tiny       # on a CPU, to see that it works

The first run stores, the others retrieve. For each it says: seconds until the last answer; with Moonpool also until the
last store has committed; where the prompts' tokens came from (computed, the engine's own cache, the connector); and
how many answers were those of run 0. Weights are made up, so that there is nothing to download; answers depend on the
whole prompt all the same. Needs vLLM.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import operator
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import (
    add_options,
    engine_machine,
    prepare_process,
    run_script,
    start_engine,
    tokens_by_source,
    wait_until_ready,
    wait_until_stored,
)
from vllm_setup import Model

import moonpool

log = logging.getLogger("moonpool.bench")

WARM_UP_REQUESTS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts. Seconds from handing them to the engine; `same_answers` of the requests were answered
    as in run 0 (a near tie can turn out otherwise where a prompt was computed in other pieces)."""

    until_last_answer_s: float
    until_last_store_s: float | None
    tokens_by_source: dict[str, int]
    stored_bytes: int | None
    same_answers: int


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    return run_script(__file__, _parser().parse_args(arguments), measure)


def measure(args: argparse.Namespace, model: Model, transfer: dict[str, Any] | None, scratch: Path) -> dict[str, Any]:
    """Start the engine in this process, run the workload `args.runs` times, print a line a run, return the result."""
    prepare_process(scratch)
    import numpy as np

    begun = time.perf_counter()
    llm = start_engine(
        args, model, transfer, scratch, kv_cache_bytes=model.kv_cache_bytes, prefix_caching=transfer is not None
    )
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    random = np.random.default_rng(args.seed)
    requests, tokens = args.requests or model.requests, args.tokens or model.tokens

    def prompts(count: int) -> list[Any]:
        drawn = random.integers(3, model.vocabulary, (count, tokens))
        return [TokensPrompt(prompt_token_ids=row.tolist()) for row in drawn]

    sampling = SamplingParams(max_tokens=args.output_tokens, temperature=0, detokenize=False, ignore_eos=True)
    load = prompts(requests)
    llm.generate(prompts(WARM_UP_REQUESTS), sampling, use_tqdm=False)
    started_s = time.perf_counter() - begun
    time.sleep(args.start_pause_s)

    client = moonpool.connect(args.url, read_only=True, name="reference-workload") if args.mode == "moonpool" else None
    ready_s = None if client is None else wait_until_ready()
    advance: Callable[[], object] = llm.llm_engine.step
    runs: list[Run] = []
    first: list[list[int]] = []
    try:
        if client is not None:
            wait_until_stored(client.stats, advance)
        for number in range(args.runs):
            before, stats_before = tokens_by_source(llm), client and client.stats()
            begun = time.perf_counter()
            log.debug("run %d begins", number)
            answers = llm.generate(load, sampling, use_tqdm=False)
            log.debug("run %d has ended", number)
            answered_s = time.perf_counter() - begun
            stored_s = stored_bytes = None
            if client is not None and stats_before is not None:
                stored_s = max(wait_until_stored(client.stats, advance) - begun, answered_s)
                stored_bytes = client.stats().bytes_written - stats_before.bytes_written
            outputs = [list(answer.outputs[0].token_ids) for answer in answers]
            first = first or outputs
            sources = {source: count - before[source] for source, count in tokens_by_source(llm).items()}
            same = sum(map(operator.eq, outputs, first))
            runs.append(Run(answered_s, stored_s, sources, stored_bytes, same))
            print(_line(args.mode, number, requests, runs[-1]), flush=True)
            time.sleep(args.pause_s)
    finally:
        if client is not None:
            client.close()
    return {
        "mode": args.mode,
        "model": args.model,
        "requests": requests,
        "tokens": tokens,
        "output_tokens": args.output_tokens,
        "kv_cache_bytes": args.kv_cache_bytes or model.kv_cache_bytes,
        "transfer_config": transfer,
        "started_s": started_s,
        "pool_ready_s": ready_s,
        "runs": [asdict(run) for run in runs],
        "answers": [hashlib.sha256(repr(answer).encode()).hexdigest()[:16] for answer in first],
        "machine": engine_machine(Path(__file__), sys.argv[1:]),
    }


def _line(mode: str, number: int, requests: int, run: Run) -> str:
    sources = run.tokens_by_source
    stored = "" if run.until_last_store_s is None else f", stored after {run.until_last_store_s:.2f} s"
    return (
        f"{mode} run {number}: {run.until_last_answer_s:.2f} s{stored}; tokens: {sources['local_compute']} computed, "
        f"{sources['local_cache_hit']} from the engine's cache, {sources['external_kv_transfer']} from the connector; "
        f"{run.same_answers} of {requests} answers as in run 0"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("mode", help="baseline, native, moonpool or MODULE:CLASS")
    add_options(parser, requests="32, tiny 4", output_tokens=1, kv_cache="8GiB, tiny 1MiB")
    add("--runs", type=int, default=3, help="passes over the same prompts (default: %(default)s)")
    add("--pause-s", type=float, default=3.0, help="rest after a run (default: %(default)s)")
    add("--start-pause-s", type=float, default=0.0, help="rest before the first run (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
