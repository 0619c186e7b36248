"""The reference workload in several modes, one after another, each in a fresh process: a table, and one JSON.

    python bench/vllm/compare.py baseline native moonpool moonpool --pool 48GiB --json reference.json
    python bench/vllm/compare.py baseline moonpool --url unix:/dev/shm/moonpool
    python bench/vllm/compare.py baseline moonpool --pool 64MiB -- --model tiny --output-tokens 4

What stands after `--` goes to every `reference_workload.py`. With `--pool`, all modes named moonpool share one node,
started for this: a mode named twice is a second engine that finds what the first has stored.

A run counts as void where the engine's own cache served a part of it. Answers are compared with those of the first
mode. Needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moonpool.bench.node import OwnNode
from moonpool.bench.output import check_json, write_json
from moonpool.errors import MoonpoolError
from moonpool.sizes import parse_bytes

NAME = Path(__file__).name
WORKLOAD = Path(__file__).with_name("reference_workload.py")


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status, 1 where a mode failed."""
    own, passed = split(arguments)
    args = _parser().parse_args(own)
    with ExitStack() as stack:
        try:
            check_json(args.json)
            if args.pool is not None:
                passed += ["--url", stack.enter_context(OwnNode(args.pool)).url]
            elif args.url is not None:
                passed += ["--url", args.url]
        except MoonpoolError as error:
            print(f"{NAME}: {error}", file=sys.stderr)
            return 1
        results, failed = [], False
        for mode in args.modes:
            result = run_mode(mode, passed)
            failed = failed or result is None
            results += [] if result is None else [result]
    if results:
        show(results)
        if args.json is not None:
            described = results[0]["machine"] | {"command": shlex.join(["python", f"bench/vllm/{NAME}", *arguments])}
            modes = [{name: value for name, value in result.items() if name != "machine"} for result in results]
            write_json(args.json, {"modes": modes, "machine": described})
    return int(failed)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first `--`, and those after it."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def run_mode(mode: str, passed: list[str]) -> dict[str, Any] | None:
    """One mode in a process of its own, its output shown as it comes; None where it failed."""
    with tempfile.TemporaryDirectory(prefix="moonpool-vllm-") as scratch:
        path = Path(scratch) / "result.json"
        finished = subprocess.run([sys.executable, str(WORKLOAD), mode, *passed, "--json", str(path)], check=False)
        if finished.returncode != 0:
            print(f"{mode}: ended with status {finished.returncode}; what it said stands above", file=sys.stderr)
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def show(results: list[dict[str, Any]]) -> None:
    """Print a row a run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("mode", "run"):
        table.add_column(heading)
    for heading in ("answered s", "stored s", "computed", "engine's cache", "connector", "answers as in the first"):
        table.add_column(heading, justify="right")
    for result in results:
        same = sum(mine == others for mine, others in zip(result["answers"], results[0]["answers"], strict=True))
        for number, run in enumerate(result["runs"]):
            sources, stored_s = run["tokens_by_source"], run["until_last_store_s"]
            local = sources["local_cache_hit"]
            table.add_row(
                result["mode"].rpartition(":")[2],
                str(number),
                f"{run['until_last_answer_s']:.2f}",
                "" if stored_s is None else f"{stored_s:.2f}",
                f"{sources['local_compute']:,}",
                f"{local:,} (void)" if local else "0",
                f"{sources['external_kv_transfer']:,}",
                f"{same} of {len(result['answers'])}" if number == 0 else f"run 0's: {run['same_answers']}",
            )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("modes", nargs="+", metavar="MODE", help="baseline, native, moonpool or MODULE:CLASS")
    add("--pool", type=parse_bytes, metavar="SIZE", help="start a node of this size for the modes named moonpool")
    add("--url", help="a node that runs already")
    add("--json", type=Path, metavar="PATH", help="write the results and the machine as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
