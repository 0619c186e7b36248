"""The commands as a user runs them, with little data: every stage works, and the figures have their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moonpool.client.streaming import choose

MOONPOOL = [sys.executable, "-c", "from moonpool.cli import main; main()"]
QUANTILES = {"p50", "p99", "p999", "max"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MOONPOOL_")}
    return subprocess.run([*MOONPOOL, "bench", *arguments], capture_output=True, text=True, env=environment)


def measured(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and what was printed. A run leaves no node and no folder behind, and is quiet about progress."""
    before = set(Path("/dev/shm").glob("moonpool-bench-*"))
    done = run(*arguments, "--quick", "--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "chart.png"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert set(Path("/dev/shm").glob("moonpool-bench-*")) <= before
    result = json.loads((tmp_path / "figures.json").read_text())
    assert result["machine"]["command"].startswith(f"moonpool bench {arguments[0]}")
    assert result["machine"]["cores"] >= 1
    return result, done.stdout


@pytest.mark.slow
def test_local_measures_everything_under_its_promised_names(tmp_path: Path) -> None:
    result, printed = measured(tmp_path, "local", "--threads", "2")
    assert result["threads"] == 2
    assert result["copy"] == choose().copy.name
    for name in ("memcpy", "put", "get_into", "put_first", "get_first", "put_second", "get_second"):
        assert set(result[f"{name}_gbps"]) == {"1MB", "2MB"}
        assert all(rate > 0 for rate in result[f"{name}_gbps"].values())
    assert result["view_us_40x2MB"] > 0
    assert set(result["roundtrip_us"]) == set(result["roundtrip_loaded_us"]) == QUANTILES
    assert set(result["exists_us"]) == {"1", "40_new", "625_new", "625_again"}
    for name in ("small_put_per_s", "small_get_per_s", "node_heap_bytes_per_object"):
        assert result[name] > 0
    assert set(result["restart_s"]) == {"4000_objects", "20_objects_0.04GB"}
    assert "put / copyto, 2MB" in printed
    assert "≥ 0.85" in printed


def test_memcpy_goes_through_the_sizes(tmp_path: Path) -> None:
    result, _ = measured(tmp_path, "memcpy")
    for kind in ("heap_to_heap", "heap_to_pool", "pool_to_heap"):
        sizes = ["4KB", "16KB", "64KB", "256KB", "1MB", "4MB", "16MB"]
        assert list(result[f"{kind}_gbps"]) == sizes
        assert list(result.get(f"{kind}_streaming_gbps", {})) == (sizes if result["copy"] == "native" else [])


@pytest.mark.slow
def test_threads_goes_from_one_client_to_several(tmp_path: Path) -> None:
    result, _ = measured(tmp_path, "threads", "--max", "2")
    for kind in ("memcpy", "put", "get_into"):
        assert list(result[f"{kind}_gbps"]) == ["1", "2"]


@pytest.mark.slow
def test_the_storm_kills_clients_and_nothing_of_theirs_is_left(tmp_path: Path) -> None:
    result, printed = measured(tmp_path, "storm", "--clients", "3", "--rate", "40")
    assert result["clients"] == 3
    assert result["killed"] >= 1
    assert result["evicted_per_s"] > 0
    for name in ("exists", "match", "acquire"):
        assert set(result[f"{name}_us"]["idle"]) == set(result[f"{name}_us"]["storm"]) == QUANTILES
    assert result["loop_steps"] > 0
    assert set(result["left"].values()) == {0}
    assert "longest loop step" in printed


@pytest.mark.parametrize("command", ["memcpy", "local", "threads", "storm"])
def test_help_has_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"moonpool bench {command} --" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("local", "--peer", "mooncake"), "--peer and --peer-python belong together"),
        (("local", "--peer", "redis", "--peer-python", sys.executable), "'redis' is not known"),
        (("local", "--peer", "mooncake", "--peer-python", "/nowhere/python"), "/nowhere/python is no interpreter"),
        (("memcpy", "--plot", "/nowhere/chart.png"), "--plot: there is no folder /nowhere"),
        (("memcpy", "--json", "/nowhere/figures.json"), "--json: there is no folder /nowhere"),
        (("memcpy", "--url", "unix:/nowhere"), "no node answers at /nowhere/node.sock"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
