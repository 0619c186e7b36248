"""Engines in other processes, as in production."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.testing.node import RunningNode
from tests.vllm.engines import OBJECT, Answer, Engine, assert_same, cached, prompt_of, settled
from tests.vllm.other_process import SEEDS

PROMPTS = [prompt_of(seed, length) for seed, length in SEEDS]
HIT = [4 * OBJECT, 7 * OBJECT]


def answers_of_another(folder: Path, node: RunningNode, objects: int, **options: Any) -> list[list[Answer]]:
    """What an engine in another process answers, twice."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.vllm.other_process", str(folder), node.url, str(objects), json.dumps(options)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1" if "tensor_parallel_size" in options else ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    runs = json.loads(ended.stdout.splitlines()[-1])
    return [[Answer(tokens, list(map(dict, logprobs)), hit) for tokens, logprobs, hit in run] for run in runs]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_in_another_process_hits_with_its_first_run(
    model: Path, plain: Engine, engine: Any, shared_node: RunningNode, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    engine().generate(PROMPTS)
    assert settled(client).objects == 11
    for found in answers_of_another(model, shared_node, 11):
        assert_same(found, right)
        assert cached(found) == HIT
    assert settled(client).sessions == 3, "the test's, and the engine's two"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_tensor_parallel_workers_store_and_load_a_part_each(
    model: Path, plain: Engine, shared_node: RunningNode, client: moonpool.Client
) -> None:
    right = plain.generate(PROMPTS)
    first, second = answers_of_another(model, shared_node, 2 * 11, tensor_parallel_size=2)
    assert_same(first, right)
    assert cached(first) == [0, 0]
    assert_same(second, right)
    assert cached(second) == HIT
    spaces = {stat.key[:16] for stat in client.list()}
    assert len(spaces) == 2, "one key space a shard"
    settled(client)
