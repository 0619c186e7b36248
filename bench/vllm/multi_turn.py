"""A trace of conversations at a steady rate, with more and more of each prompt seen before: what a user waits for.

    python bench/vllm/multi_turn.py baseline --json baseline.json
    python bench/vllm/multi_turn.py moonpool --url unix:/dev/shm/moonpool --json moonpool.json
    python bench/vllm/multi_turn.py baseline --model tiny --output-tokens 4    # on a CPU, to see that it works

For each share of hits (0, 10, 50 and 90 %) earlier turns are computed, and so stored where there is a store; then the
engine's own cache is emptied, and requests arrive at random moments, each an earlier turn's beginning and new tokens
behind it. Measured are the time to the first token (TTFT) and between tokens (ITL), from arrival, mean and 99th
percentile. Without a store a hit is computed like anything else, so the same trace compares the two. Needs vLLM.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field
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
from moonpool.errors import MoonpoolError

SHARES = (0.0, 0.1, 0.5, 0.9)


@dataclass(slots=True)
class Timing:
    """One request: when it was to arrive, and when each of its tokens came."""

    due_s: float
    tokens_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Level:
    """One share of hits. Seconds."""

    share: float
    ttft_mean_s: float
    ttft_p99_s: float
    itl_mean_s: float
    itl_p99_s: float
    tokens_by_source: dict[str, int]


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    return run_script(__file__, _parser().parse_args(arguments), measure)


def measure(args: argparse.Namespace, model: Model, transfer: dict[str, Any] | None, scratch: Path) -> dict[str, Any]:
    """Start the engine in this process, play the trace once a share, return the result."""
    prepare_process(scratch)
    import numpy as np

    random = np.random.default_rng(args.seed)
    tokens, requests = args.tokens or model.tokens, args.requests or model.requests
    llm = start_engine(args, model, transfer, scratch, kv_cache_bytes=model.serving_kv_cache_bytes, prefix_caching=True)
    client = moonpool.connect(args.url, read_only=True, name="multi-turn") if args.mode == "moonpool" else None
    if client is not None:
        wait_until_ready()
    levels = []
    # Once without being counted: what an engine does for the first time takes longer.
    for number, share in enumerate((SHARES[-1], *SHARES)):
        earlier = random.integers(3, model.vocabulary, (args.conversations or requests, tokens))
        if transfer is not None:
            _play(llm, [row.tolist() for row in earlier], [0.0] * len(earlier), 1)
        if client is not None:
            wait_until_stored(client.stats, llm.llm_engine.step)
        if not llm.reset_prefix_cache():
            raise MoonpoolError("the engine's own cache can't be emptied: requests are still running")
        known = int(share * tokens)
        prompts = []
        for request in range(requests):
            new = random.integers(3, model.vocabulary, tokens - known)
            prompts.append([*earlier[request % len(earlier)][:known].tolist(), *new.tolist()])
        dues = np.cumsum(random.exponential(1 / args.rate, len(prompts))).tolist()
        before = tokens_by_source(llm)
        timings = _play(llm, prompts, dues, args.output_tokens)
        sources = {source: count - before[source] for source, count in tokens_by_source(llm).items()}
        if number:
            levels.append(_level(share, timings, sources))
            print(_line(args.mode, levels[-1]), flush=True)
    return {
        "mode": args.mode,
        "model": args.model,
        "requests": requests,
        "rate_per_s": args.rate,
        "tokens": tokens,
        "output_tokens": args.output_tokens,
        "levels": [asdict(level) for level in levels],
        "machine": engine_machine(Path(__file__), sys.argv[1:]),
    }


def _play(llm: Any, prompts: list[list[int]], dues_s: list[float], output_tokens: int) -> list[Timing]:
    """Hand each prompt to the engine when it is due, and step the engine until all are answered."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0, detokenize=False, ignore_eos=True)
    begun = time.perf_counter()
    timings: dict[str, Timing] = {}
    waiting = list(zip(dues_s, prompts, strict=True))[::-1]
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - begun
        while waiting and waiting[-1][0] <= now:
            due_s, prompt = waiting.pop()
            name = f"{begun}-{len(timings)}"
            timings[name] = Timing(due_s)
            engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        outputs, now = engine.step(), time.perf_counter() - begun
        for output in outputs:
            timing = timings[output.request_id]
            timing.tokens_s += [now] * (len(output.outputs[0].token_ids) - len(timing.tokens_s))
    return list(timings.values())


def _level(share: float, timings: list[Timing], sources: dict[str, int]) -> Level:
    import numpy as np

    first = np.array([timing.tokens_s[0] - timing.due_s for timing in timings])
    between = np.concatenate([np.diff(timing.tokens_s) for timing in timings])
    between = between if len(between) else np.zeros(1)
    return Level(
        share,
        float(first.mean()),
        float(np.percentile(first, 99)),
        float(between.mean()),
        float(np.percentile(between, 99)),
        sources,
    )


def _line(mode: str, level: Level) -> str:
    sources = level.tokens_by_source
    return (
        f"{mode} {level.share:.0%} hits: TTFT {level.ttft_mean_s * 1e3:.0f} ms, p99 {level.ttft_p99_s * 1e3:.0f}; "
        f"ITL {level.itl_mean_s * 1e3:.2f} ms, p99 {level.itl_p99_s * 1e3:.1f}; tokens: "
        f"{sources['local_compute']} computed, {sources['local_cache_hit']} from the engine's cache, "
        f"{sources['external_kv_transfer']} from the connector"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("mode", help="baseline, native, moonpool or MODULE:CLASS")
    add_options(parser, requests="32, tiny 4", output_tokens=64, kv_cache="48GiB, tiny 64MiB")
    add("--conversations", type=int, help="earlier turns that they go on from (default: one each)")
    add("--rate", type=float, default=2.0, help="requests a second (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
