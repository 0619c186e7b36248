"""The serving form: `vllm serve` under vLLM's own serving benchmark, the same prompts twice, in several modes.

    python bench/vllm/serving.py baseline native moonpool --pool 48GiB --json serving.json
    python bench/vllm/serving.py baseline moonpool --url unix:/dev/shm/moonpool
    python bench/vllm/serving.py baseline --model tiny -- --enforce-eager      # on a CPU, to see that it works

Each mode has a server of its own, over a model of Llama-3.1-8B's shape with made-up weights and a tokenizer of one word
a token. `vllm bench serve` sends it 30 prompts of 10,000 random tokens at once (dataset `random`, infinite rate), for
128 tokens each: run 0, which stores, and run 1, which retrieves. The KV cache (48 GiB) holds them all, so the engine's
own prefix cache is reset between the runs, and a run that it served a part of all the same is marked void.

What stands after `--` goes to every `vllm serve`. With `--pool`, all modes named moonpool share one node, started for
this. Needs vLLM, aiohttp and transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import split
from engine import EXTRA_LENGTH, add_options, engine_machine, wait_until_stored
from engine_server import EngineServer, environment
from vllm_setup import MODELS, Model, check_native, transfer_config, write_model, write_stand_ins

import moonpool
from moonpool.bench.node import OwnNode
from moonpool.bench.output import check_json, write_json
from moonpool.errors import MoonpoolError
from moonpool.sizes import parse_bytes

LATENCIES = ("ttft", "tpot", "itl")
"""Time to first token, time per output token after the first, time between two tokens: as vLLM's benchmark counts."""
WARM_UP_SEED_OFFSET = 1_000_003
"""Warm-up prompts are drawn with another seed than those that are measured."""
WARM_UP_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of the benchmark. Latencies in milliseconds, each with mean, median and p99."""

    seconds: float
    completed: int
    requests_per_s: float
    output_tokens_per_s: float
    latencies_ms: dict[str, dict[str, float]]
    tokens_by_source: dict[str, int]
    hits: dict[str, int]
    void: bool


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    own, passed = split(arguments)
    args = _parser().parse_args(own)
    results: list[dict[str, Any]] = []
    try:
        check_json(args.json)
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-vllm-")))
            stand_in = write_stand_ins(scratch)
            if stand_in:
                sys.path.append(str(scratch))
            write_model(MODELS[args.model], folder := _made(scratch / "model"), tokenizer=True)
            if args.pool is not None:
                args.url = stack.enter_context(OwnNode(args.pool)).url
            for mode in args.modes:
                results.append(measure(mode, args, folder, passed, scratch if stand_in else None))
            if args.json is not None:
                described = engine_machine(Path(__file__), arguments)
                write_json(args.json, {"modes": results, "machine": described})
    except MoonpoolError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    finally:
        if results:
            show(results)
    return 0


def measure(
    mode: str, args: argparse.Namespace, folder: Path, passed: list[str], stand_in: Path | None
) -> dict[str, Any]:
    """One mode: start its server, warm it up, run the benchmark `args.runs` times, stop it."""
    if mode == "native":
        check_native()
    model = MODELS[args.model]
    transfer = transfer_config(mode, args.extra_config, offload_bytes=args.offload_bytes, url=args.url)
    command = [*serve_options(model, args, transfer), *passed]
    runs: list[Run] = []
    with ExitStack() as stack:
        log = None if args.server_log is None else args.server_log.with_suffix(f".{mode.rpartition(':')[2]}.log")
        server = stack.enter_context(EngineServer(folder, command, stand_in, log=log))
        client = None
        if mode == "moonpool":
            client = stack.enter_context(moonpool.connect(args.url, read_only=True, name="serving-bench"))
        print(f"{mode}: serves after {server.started_s:.0f} s", flush=True)
        for number in range(-1, args.runs):
            before, hits_before = server.tokens_by_source(), server.hits()
            found = bench(args, model, folder, server, stand_in, warm_up=number < 0)
            if client is not None:
                wait_until_stored(client.stats, lambda: None)
            if number >= 0:
                sources = {name: count - before[name] for name, count in server.tokens_by_source().items()}
                hits = {name: count - hits_before[name] for name, count in server.hits().items()}
                runs.append(_run(found, sources, hits))
                print(_line(mode, number, runs[-1]), flush=True)
            server.reset_prefix_cache()
    return {
        "mode": mode,
        "model": args.model,
        "started_s": server.started_s,
        "serve_options": command,
        "transfer_config": transfer,
        "prompts": args.requests or model.serving_requests,
        "tokens": args.tokens or model.tokens,
        "output_tokens": args.output_tokens,
        "runs": [asdict(run) for run in runs],
    }


def serve_options(model: Model, args: argparse.Namespace, transfer: dict[str, Any] | None) -> list[str]:
    """The options of `vllm serve`: the model's shape and cache, and otherwise what vLLM does unasked."""
    length = (args.tokens or model.tokens) + args.output_tokens + EXTRA_LENGTH
    options = [
        "--load-format", "dummy", "--dtype", model.dtype, "--max-model-len", str(length),
        "--kv-cache-memory-bytes", str(args.kv_cache_bytes or model.serving_kv_cache_bytes),
        "--enable-prefix-caching", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if model.block_size is not None:
        options += ["--block-size", str(model.block_size)]
    if transfer is not None:
        options += ["--kv-transfer-config", json.dumps(transfer)]
    return options


def bench(
    args: argparse.Namespace, model: Model, folder: Path, server: EngineServer, stand_in: Path | None, *, warm_up: bool
) -> dict[str, Any]:
    """`vllm bench serve` once; its result as it wrote it. Raises `MoonpoolError` where a request failed."""
    prompts = WARM_UP_PROMPTS if warm_up else args.requests or model.serving_requests
    seed = args.seed + WARM_UP_SEED_OFFSET if warm_up else args.seed
    with tempfile.TemporaryDirectory(prefix="moonpool-vllm-") as results:
        # No ready check: it would send the first prompt, and have it cached.
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai",
            "--base-url", server.url, "--endpoint", "/v1/completions", "--model", str(folder),
            "--dataset-name", "random", "--random-input-len", str(args.tokens or model.tokens),
            "--random-output-len", str(args.output_tokens), "--num-prompts", str(prompts), "--request-rate", "inf",
            "--temperature", "0", "--seed", str(seed), "--ready-check-timeout-sec", "0", "--disable-tqdm",
            "--percentile-metrics", ",".join(LATENCIES), "--metric-percentiles", "99", "--save-result",
            "--result-dir", results, "--result-filename", "result.json",
        ]  # fmt: skip
        finished = subprocess.run(command, env=environment(stand_in), capture_output=True, text=True, check=False)
        path = Path(results) / "result.json"
        if finished.returncode or not path.exists():
            raise MoonpoolError(f"vllm bench serve failed: {(finished.stderr or finished.stdout).strip()[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
    if found["completed"] != prompts:
        raise MoonpoolError(f"only {found['completed']} of {prompts} requests were answered; look at the server's log")
    return found


def show(results: list[dict[str, Any]]) -> None:
    """Print a row a run: mean / median / P99 of each latency."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="milliseconds: mean / median / P99", title_justify="left")
    for heading in ("mode", "run"):
        table.add_column(heading)
    for heading in ("TTFT", "TPOT", "ITL", "output tok/s", "connector", "engine's cache"):
        table.add_column(heading, justify="right")
    for result in results:
        for number, run in enumerate(result["runs"]):
            local = run["tokens_by_source"]["local_cache_hit"]
            table.add_row(
                result["mode"].rpartition(":")[2],
                str(number),
                *(" / ".join(f"{value:.1f}" for value in run["latencies_ms"][name].values()) for name in LATENCIES),
                f"{run['output_tokens_per_s']:.0f}",
                f"{run['tokens_by_source']['external_kv_transfer']:,}",
                f"{local:,} (void)" if run["void"] else f"{local:,}",
            )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(table)


def _run(found: dict[str, Any], sources: dict[str, int], hits: dict[str, int]) -> Run:
    latencies = {name: {kind: found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")} for name in LATENCIES}
    return Run(
        seconds=found["duration"],
        completed=found["completed"],
        requests_per_s=found["request_throughput"],
        output_tokens_per_s=found["output_throughput"],
        latencies_ms=latencies,
        tokens_by_source=sources,
        hits=hits,
        void=sources["local_cache_hit"] > 0 or hits["prefix_cache_hits"] > 0,
    )


def _line(mode: str, number: int, run: Run) -> str:
    means = ", ".join(f"{name.upper()} {run.latencies_ms[name]['mean']:.1f} ms" for name in LATENCIES)
    return f"{mode} run {number}: {run.seconds:.2f} s, mean {means}{'; void' if run.void else ''}"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("modes", nargs="+", metavar="MODE", help="baseline, native, moonpool or MODULE:CLASS")
    add_options(parser, requests="30, tiny 4", output_tokens=128, kv_cache="48GiB, tiny 64MiB")
    add("--runs", type=int, default=2, help="passes over the same prompts (default: %(default)s)")
    add("--pool", type=parse_bytes, metavar="SIZE", help="start a node of this size for the modes named moonpool")
    add("--server-log", type=Path, metavar="PATH", help="keep each server's log, PATH with the mode in its name")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
