"""An engine in this process, and what the scripts that measure one have in common."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_setup import MODELS, Model, check_native, spread_weights, transfer_config, write_model, write_stand_ins

from moonpool.bench.machine import machine
from moonpool.bench.output import check_json, write_json
from moonpool.errors import MoonpoolError
from moonpool.observe.stats import NodeStats
from moonpool.sizes import parse_bytes

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""Where a prompt token's KV cache can come from, in vLLM's words: its own work, its own cache, the connector."""
SETTLE_S = 0.2
"""How long nothing may be under way before the stores count as done: the gap between two batches is far shorter."""
POLL_S = 0.002
STORED_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 180.0
EXTRA_LENGTH = 64
"""Tokens that a sequence may be longer than prompt and answer: vLLM asks for room."""

Measure = Callable[[argparse.Namespace, Model, dict[str, Any] | None, Path], dict[str, Any]]
"""What a script does: from the options, the model, the connector's configuration and a folder to its result."""


def run_script(script: str, args: argparse.Namespace, measure: Measure) -> int:
    """Measure one mode and write the result where `args` say; returns the exit status."""
    try:
        check_json(args.json)
        transfer = transfer_config(args.mode, args.extra_config, offload_bytes=args.offload_bytes, url=args.url)
        with tempfile.TemporaryDirectory(prefix="moonpool-vllm-") as scratch:
            result = measure(args, MODELS[args.model], transfer, Path(scratch))
    except MoonpoolError as error:
        print(f"{Path(script).name}: {error}", file=sys.stderr)
        return 1
    if args.json is not None:
        write_json(args.json, result)
    return 0


def add_options(parser: argparse.ArgumentParser, *, requests: str, output_tokens: int, kv_cache: str) -> None:
    """Options of every workload; `requests` and `kv_cache` say what the models' defaults are."""
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-8b", help="the shape (default: %(default)s)")
    add("--requests", type=int, help=f"prompts of a pass (default: {requests})")
    add("--tokens", type=int, help="tokens of a prompt (default: 10,000, tiny 600)")
    add("--output-tokens", type=int, default=output_tokens, help="tokens of an answer (default: %(default)s)")
    add("--kv-cache-bytes", type=parse_bytes, metavar="SIZE", help=f"the engine's KV cache (default: {kv_cache})")
    add("--offload-bytes", type=parse_bytes, default=48 << 30, metavar="SIZE", help="native's memory (default: 48GiB)")
    add("--extra-config", type=json.loads, default={}, metavar="JSON", help="for the connector's extra config")
    add("--url", help="a Moonpool node that runs already (default: the host's)")
    add("--seed", type=int, default=0, help="of the prompts; the same for all that are compared (default: %(default)s)")
    add("--json", type=Path, metavar="PATH", help="write the result and the machine as JSON")


def prepare_process(scratch: Path) -> None:
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


def start_engine(
    args: argparse.Namespace,
    model: Model,
    transfer: dict[str, Any] | None,
    scratch: Path,
    *,
    kv_cache_bytes: int,
    prefix_caching: bool,
) -> Any:
    """A `vllm.LLM` of that shape in this process: one scheduler, one worker, no tokenizer, no CUDA graphs.
    `kv_cache_bytes` is the KV cache where `args` don't ask for another."""
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
        kv_cache_memory_bytes=args.kv_cache_bytes or kv_cache_bytes,
        enable_prefix_caching=prefix_caching,
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
