"""Tests with real vLLM engines on the CPU, all in one process: a further engine costs a third of a second.

They run in an environment of their own, see scripts/setup-vllm; in one without vLLM they aren't collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.testing.node import RunningNode

collect_ignore_glob = ["test_*.py"]
if importlib.util.find_spec("vllm"):
    collect_ignore_glob.clear()
    os.environ.update(  # before vLLM is imported: it reads them then
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        TORCHDYNAMO_DISABLE="1",  # compiling takes seconds, and a compiler
    )
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it overrides what a test asks for

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(config: pytest.Config) -> None:
        """Leave at once: vLLM takes a second an engine to take itself apart, and there are a hundred."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


_status = 0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


pytest.register_assert_rewrite("tests.vllm.engines")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things makes no miss of a hit."""
    monkeypatch.setattr("moonpool.engines.vllm.lookups.LOOKUP_PATIENCE_S", 10.0)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A maker of model folders, all of one name: the same arguments, the same folder."""
    from tests.vllm.models import write_model

    made: dict[Any, Path] = {}

    def make(**changes: Any) -> Path:
        key = tuple(sorted((name, str(value)) for name, value in changes.items()))
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp("model") / "llama", **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def model(models: Callable[..., Path]) -> Path:
    return models()


@pytest.fixture
def client(client: moonpool.Client) -> moonpool.Client:
    """A client of the module's node, which is empty, and has all of its pool."""
    from tests.vllm.engines import grown

    grown(client)
    return client


@pytest.fixture
def engine(model: Path, shared_node: RunningNode, client: moonpool.Client) -> Iterator[Callable[..., Any]]:
    """A maker of engines, which end with the test. They use the module's node, which is empty, unless told `url`."""
    from tests.vllm.engines import Engine

    made: list[Engine] = []

    def make(folder: Path = model, *, url: str | None = shared_node.url, **options: Any) -> Engine:
        made.append(Engine(folder, url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Any]:
    """An engine without the pool: what it answers is right."""
    from tests.vllm.engines import Engine

    engine = Engine(model, None)
    yield engine
    engine.close()
