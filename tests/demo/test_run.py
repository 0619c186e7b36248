"""The demo as a whole: it passes on a store that works, and on no other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.demo.compare import Verdict
from moonpool.demo.node import temporary_node
from moonpool.demo.run import IN_PROCESS, MOONPOOL, RECOMPUTE, DemoFailed, Result
from moonpool.demo.settings import Settings, Stages
from moonpool.demo.tamper import CONTROLS
from moonpool.errors import NodeUnavailable

needs_torch = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "transformers")),
    reason="torch or transformers isn't installed",
)
SAME = Verdict(tokens_differing=0, tokens_compared=10, ties=0, logits_off=0.1, kv_off=0.1)
WRONG = replace(SAME, logits_off=20.0)


def result(**changes: Any) -> Result:
    """Return the result of a run in which all went well, but for `changes` of verdicts or stages by name."""
    runs = (*RECOMPUTE, *IN_PROCESS, *MOONPOOL)
    verdicts = dict.fromkeys(runs, SAME) | dict.fromkeys(CONTROLS, WRONG)
    stages = {name: Stages(name, 1.0, tokens=100, loaded=90, loadable=90) for name in (*runs, *CONTROLS)}
    return Result(
        settings=Settings(),
        prompts=9,
        prompt_tokens=900,
        tolerance=1e-4,
        stages=stages | changes.get("stages", {}),
        verdicts=verdicts | changes.get("verdicts", {}),
        url="",
    )


def test_a_run_in_which_all_went_well_passes() -> None:
    result().check()


@pytest.mark.parametrize("name", [RECOMPUTE[1], *IN_PROCESS, *MOONPOOL])
def test_a_difference_in_any_run_fails(name: str) -> None:
    with pytest.raises(DemoFailed, match=f"{name} differs from recomputing.*logits off by 20 times"):
        result(verdicts={name: WRONG}).check()


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_that_goes_unnoticed_fails(name: str) -> None:
    with pytest.raises(DemoFailed, match="doesn't notice"):
        result(verdicts={name: SAME}).check()


@pytest.mark.parametrize("name", [IN_PROCESS[1], MOONPOOL[1]])
def test_a_second_run_that_recomputed_fails(name: str) -> None:
    with pytest.raises(DemoFailed, match="loaded 64 of 90 tokens, so it proves nothing: no node"):
        result(
            stages={name: Stages(name, 1.0, tokens=100, loaded=64, loadable=90, trouble="no node")}
        ).check()


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `moonpool demo` as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "moonpool", "demo", *arguments], capture_output=True, text=True, timeout=110
    )


def test_an_unknown_dtype_is_refused_in_one_line() -> None:
    done = demo("--dtype", "int8")
    assert done.returncode == 1
    assert done.stderr == "error: option 'dtype': 'int8' is not one of float32, bfloat16\n"


def test_there_being_no_node_is_said_in_one_line(tmp_path: Path) -> None:
    done = demo("--url", f"unix:{tmp_path / 'nowhere'}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr


def test_a_store_inside_one_process_is_refused() -> None:
    done = demo("--url", "embedded:64MiB")
    assert done.returncode == 1
    assert "the demo's processes share a node" in done.stderr


def check(found: dict[str, Any]) -> None:
    assert found["verdicts"][MOONPOOL[1]]["same"]
    assert found["verdicts"][MOONPOOL[1]]["tokens_compared"] == 36
    assert found["stages"][MOONPOOL[0]]["stored"] > 0
    assert found["stages"][MOONPOOL[1]]["loaded"] == found["stages"][MOONPOOL[1]]["loadable"] > 0
    assert not any(found["verdicts"][name]["same"] for name in CONTROLS)


@needs_torch
@pytest.mark.slow
def test_the_demo_runs_from_end_to_end() -> None:
    done = demo("--quick", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    check(json.loads(done.stdout))


@needs_torch
@pytest.mark.slow
def test_in_bfloat16_on_a_node_that_ran_before_it_gives_back_its_room() -> None:
    with temporary_node(128 << 20) as url, moonpool.connect(url) as client:
        client.put("mine", b"stays")
        done = demo("--quick", "--json", "--dtype", "bfloat16", "--url", url)
        assert (done.returncode, done.stderr) == (0, "")
        check(json.loads(done.stdout))
        assert [stat.key for stat in client.list()] == [b"mine"]


@pytest.mark.slow
def test_the_demos_node_is_gone_afterwards_and_its_folder_with_it() -> None:
    with temporary_node(64 << 20) as url:
        folder = Path(url.removeprefix("unix:"))
        assert folder.is_dir()
    assert not folder.parent.exists()
    with pytest.raises(NodeUnavailable):
        moonpool.connect(url)


@needs_torch
@pytest.mark.slow
def test_a_demo_that_is_told_to_stop_takes_its_processes_with_it() -> None:
    command = [sys.executable, "-m", "moonpool", "demo", "--quick"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        children = wait_for_children(process.pid, 2)
        process.terminate()
        process.wait(30)
    assert process.returncode == 143
    # A worker that was only just being started ends by itself, once it finds that nobody gives it a job.
    deadline = time.monotonic() + 30
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, children))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_children(pid: int, count: int) -> list[int]:
    """Return the ids of `pid`'s children once there are `count`: the node and a worker."""
    for _ in range(300):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if len(children) >= count:
            return [int(child) for child in children]
        time.sleep(0.1)
    raise AssertionError(f"the demo has only {children} after 30 s")
