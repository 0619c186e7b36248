"""A vLLM engine in a process of its own: `python -m tests.vllm.other_process MODEL URL OBJECTS OPTIONS`.

Answers the prompts of `SEEDS` twice, once the pool holds so many objects, and writes its answers as JSON to the last
line of standard output. `OPTIONS` is JSON: keyword arguments of `Engine`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import moonpool

SEEDS = [(1, 300), (2, 500)]
"""Seed and length of each prompt."""


def main(folder: str, url: str, objects: str, options: str) -> None:
    from moonpool.engines.vllm import lookups
    from moonpool.testing.node import eventually
    from tests.vllm.engines import Engine, prompt_of

    lookups.LOOKUP_PATIENCE_S = 10.0
    engine = Engine(Path(folder), url, **json.loads(options))
    prompts = [prompt_of(seed, length) for seed, length in SEEDS]
    runs: list[Any] = []
    with moonpool.connect(url) as client:
        for _ in range(2):
            runs.append(
                [[a.tokens, list(map(list, map(dict.items, a.logprobs))), a.cached] for a in engine.generate(prompts)]
            )
            eventually(lambda: client.stats().objects == int(objects), f"{objects} objects are stored")
    print(json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
