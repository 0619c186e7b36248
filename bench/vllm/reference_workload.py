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
import json
import logging
import operator
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_setup import MODELS, Model, check_native, spread_weights, transfer_config, write_model, write_stand_ins

import moonpool
from moonpool.bench.machine import machine
from moonpool.bench.output import check_json, write_json
from moonpool.errors import MoonpoolError
from moonpool.observe.stats import NodeStats
from moonpool.sizes import parse_bytes

log = logging.getLogger("moonpool.bench")

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""Where a prompt token's KV cache can come from, in vLLM's words: its own work, its own cache, the connector."""
SETTLE_S = 0.2
"""How long nothing may be under way before the stores count as done: the gap between two batches is far shorter."""
POLL_S = 0.002
STORED_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 180.0
WARM_UP_REQUESTS = 2
EXTRA_LENGTH = 64
"""Tokens that a sequence may be longer than prompt and answer: vLLM asks for room."""


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
    args = _parser().parse_args(arguments)
    model = MODELS[args.model]
    try:
        check_json(args.json)
        transfer = transfer_config(args.mode, args.extra_config, offload_bytes=args.offload_bytes, url=args.url)
        with tempfile.TemporaryDirectory(prefix="moonpool-vllm-") as scratch:
            result = measure(args, model, transfer, Path(scratch))
    except MoonpoolError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    if args.json is not None:
        write_json(args.json, result)
    return 0


def measure(args: argparse.Namespace, model: Model, transfer: dict[str, Any] | None, scratch: Path) -> dict[str, Any]:
    """Start the engine in this process, run the workload `args.runs` times, print a line a run, return the result."""
    _prepare_process(scratch)
    import numpy as np

    begun = time.perf_counter()
    llm = start_engine(args, model, transfer, scratch)
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


def start_engine(args: argparse.Namespace, model: Model, transfer: dict[str, Any] | None, scratch: Path) -> Any:
    """A `vllm.LLM` of that shape in this process: one scheduler, one worker, no tokenizer, no CUDA graphs."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if args.mode == "native":
        check_native()
    tokens = args.tokens or model.tokens
    write_model(model, scratch, tokenizer=False)
    spread_weights()
    options: dict[str, Any] = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
    if model.block_size is not None:
        options["block_size"] = model.block_size
    return LLM(
        model=str(scratch),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=model.dtype,
        max_model_len=tokens + args.output_tokens + EXTRA_LENGTH,
        max_num_seqs=args.requests or model.requests,
        max_num_batched_tokens=max(16_384, tokens + EXTRA_LENGTH),
        kv_cache_memory_bytes=args.kv_cache_bytes or model.kv_cache_bytes,
        enable_prefix_caching=getattr(args, "prefix_caching", transfer is not None),
        disable_log_stats=False,  # counts where tokens came from
        **options,
    )


def wait_until_ready(timeout_s: float = READY_TIMEOUT_S) -> float:
    """Wait until the engine's worker moves KV cache at full speed: until then its pool is being registered with CUDA.
    Returns how long that took, in seconds. Raises `MoonpoolError` after `timeout_s`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    begun = time.perf_counter()
    if not get_kv_transfer_group().wait_ready(timeout_s):
        raise MoonpoolError(f"the pool was not ready within {timeout_s:g} s; the engine's log says why")
    return time.perf_counter() - begun


def wait_until_stored(
    stats: Callable[[], NodeStats],
    advance: Callable[[], object],
    *,
    settle_s: float = SETTLE_S,
    timeout_s: float = STORED_TIMEOUT_S,
) -> float:
    """Wait until every store has committed, and return the `time.perf_counter()` at which the last one had.

    That is the first moment since which, for `settle_s`, the node had no reservation open or waiting and no byte more
    was written. `advance` lets the engine take a step meanwhile (a connector may commit in one; without work it costs
    nothing). Raises `MoonpoolError` after `timeout_s`.
    """
    deadline = time.perf_counter() + timeout_s
    idle_since, written = None, -1
    while True:
        advance()
        now, seen = time.perf_counter(), stats()
        if seen.reservations or seen.reservations_waiting or seen.bytes_written != written:
            idle_since, written = None, seen.bytes_written
        idle_since = idle_since or now
        if now - idle_since >= settle_s:
            return idle_since
        if now > deadline:
            raise MoonpoolError(
                f"stores were still under way after {timeout_s:g} s: {seen.reservations} reservations open; "
                "look at the engine's log for a copy that hangs"
            )
        time.sleep(POLL_S)


def tokens_by_source(llm: Any) -> dict[str, int]:
    """Prompt tokens since the engine started, by where their KV cache came from."""
    counted = dict.fromkeys(SOURCES, 0)
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens_by_source":
            counted[metric.labels["source"]] += int(metric.value)
    return counted


def engine_machine(script: Path, arguments: list[str]) -> dict[str, Any]:
    """The machine, and the engine, libraries and GPUs on it. `script` and `arguments` are the command that ran."""
    import torch
    import vllm

    described: dict[str, Any] = dict(machine(arguments))
    described |= {
        "command": shlex.join(["python", f"bench/vllm/{script.name}", *arguments]),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
    }
    return described


def _prepare_process(scratch: Path) -> None:
    """What must be set before vLLM is imported: no network, one process, no tuned sampler to build."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if write_stand_ins(scratch):
        sys.path.append(str(scratch))
    logging.basicConfig(format="%(relativeCreated)d ms %(name)s: %(message)s", level=logging.WARNING)
    # How long the pool's registration took, what was refused; at "debug" the time of each stage of each batch.
    logging.getLogger("moonpool").setLevel(os.environ.get("MOONPOOL_LOG", "info").upper())


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
    add("--model", choices=MODELS, default="llama-8b", help="the shape (default: %(default)s)")
    add("--requests", type=int, help="prompts a run (default: 32, tiny 4)")
    add("--tokens", type=int, help="tokens of a prompt (default: 10,000, tiny 600)")
    add("--output-tokens", type=int, default=1, help="tokens of an answer (default: %(default)s)")
    add("--runs", type=int, default=3, help="passes over the same prompts (default: %(default)s)")
    add("--kv-cache-bytes", type=parse_bytes, metavar="SIZE", help="the engine's KV cache (default: 8GiB, tiny 1MiB)")
    add("--offload-bytes", type=parse_bytes, default=48 << 30, metavar="SIZE", help="native's memory (default: 48GiB)")
    add("--extra-config", type=json.loads, default={}, metavar="JSON", help="for the connector's extra config")
    add("--url", help="the Moonpool node (default: the host's)")
    add("--pause-s", type=float, default=3.0, help="rest after a run (default: %(default)s)")
    add("--start-pause-s", type=float, default=0.0, help="rest before the first run (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts; the same for all that are compared (default: %(default)s)")
    add("--json", type=Path, metavar="PATH", help="write the result and the machine as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
