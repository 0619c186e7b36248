"""One engine of vLLM's in this process, and what its answers are compared by."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.inputs import TokensPrompt

import moonpool
from moonpool import ObjectStat, Status
from moonpool.engines.vllm.notes import decode_note
from moonpool.engines.vllm.scheduler import Scheduler
from moonpool.engines.vllm.worker import Worker
from moonpool.gpu.mover import Transfer
from moonpool.testing.node import eventually
from tests.vllm.models import VOCABULARY

BLOCK = 32
OBJECT = 64
"""Tokens."""
MIB = 1 << 20

Prompt = list[int]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[dict[int, float]]
    """Of each token, the likeliest few."""
    cached: int
    """Tokens of the prompt that weren't computed, as the engine counts them."""


class Engine:
    """An engine over the pool at `url`, or without one (None). Options that the connector knows go to it, others to
    vLLM."""

    def __init__(
        self,
        model: Path,
        url: str | None,
        *,
        extra: dict[str, Any] | None = None,
        role: str = "kv_both",
        **options: Any,
    ) -> None:
        transfer = None
        if url is not None:
            transfer = KVTransferConfig(
                kv_connector="MoonpoolConnector",
                kv_connector_module_path="moonpool.engines.vllm",
                kv_role=role,
                kv_connector_extra_config={
                    "url": url,
                    "tokens_per_object": OBJECT,
                    "load_min_tokens": OBJECT,
                    "admission": "always",
                    **(extra or {}),
                },
            )
        # vLLM keeps the connector of a worker process in a global; here several engines take turns with it.
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.llm = LLM(
            **{
                "model": str(model),
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "max_model_len": 2048,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 2048,
                "block_size": BLOCK,
                "kv_cache_memory_bytes": 6 * MIB,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
                "kv_transfer_config": transfer,
                **options,
            }
        )
        self.agent = kv_transfer_state._KV_CONNECTOR_AGENT
        self._ids = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """What vLLM does within is this engine's doing."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.agent
        yield

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Scheduler:
        found = self.core.scheduler.connector._scheduler
        assert isinstance(found, Scheduler)
        return found

    @property
    def worker(self) -> Worker:
        found = self.agent._worker
        assert isinstance(found, Worker)
        return found

    def generate(
        self, prompts: Sequence[Prompt], *, tokens: int = 8, salt: str | None = None, **more: Any
    ) -> list[Answer]:
        """Answer prompts greedily, all at once, and wait until what is to be stored of them has been copied."""
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        for prompt in asked:
            if salt is not None:
                prompt["cache_salt"] = salt
        with self.active():
            found = [answer_of(output) for output in self.llm.generate(asked, sampling(tokens), use_tqdm=False, **more)]
        self.await_copies()
        return found

    def await_copies(self) -> None:
        """Wait until all stores that have begun are copied, or given up: `settled` then knows the rest."""
        if isinstance(worker := getattr(self.agent, "_worker", None), Worker):
            eventually(
                lambda: all(storing.read() for storing in worker._stores._unread), "stores are copied", within_s=60
            )

    def add(self, prompt: Prompt, *, tokens: int = 8) -> str:
        """Hand in a request, for `step` to serve."""
        self._ids += 1
        name = f"request-{self._ids}"
        with self.active():
            internal = self.llm.llm_engine.add_request(
                name, TokensPrompt(prompt_token_ids=list(prompt)), sampling(tokens)
            )
        return str(internal or name)

    def step(self) -> list[Any]:
        with self.active():
            return list(self.llm.llm_engine.step())

    def abort(self, name: str) -> None:
        with self.active():
            self.llm.llm_engine.abort_request([name], internal=True)

    def run(self, *, steps_max: int = 1_000_000) -> list[Answer]:
        """Step until nothing is left to do; the answers of requests that were finished, in the order of their ids."""
        finished: dict[str, Answer] = {}
        for _ in range(steps_max):
            with self.active():
                if not self.core.scheduler.has_requests():
                    return [finished[name] for name in sorted(finished, key=lambda name: int(name.rpartition("-")[2]))]
            for output in self.step():
                if output.finished:
                    finished[output.request_id] = answer_of(output)
        raise AssertionError(f"the engine isn't done after {steps_max} steps")

    def reset(self) -> None:
        """What follows new weights."""
        with self.active():
            assert self.llm.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        """End what is ours, as vLLM does. Its own end would take down what the process's other engines need too: so
        the engine is kept."""
        for connector in (self.core.scheduler.connector, self.agent):
            if connector is not None:
                connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        _ended.append(self.llm)


_ended: list[LLM] = []


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)


def answer_of(output: Any) -> Answer:
    (found,) = output.outputs
    logprobs = [{token: entry.logprob for token, entry in place.items()} for place in found.logprobs]
    return Answer(list(found.token_ids), logprobs, output.num_cached_tokens)


def prompt_of(seed: int, length: int) -> Prompt:
    """A made-up prompt; of one seed, a longer one begins with a shorter one."""
    draw = random.Random(seed)
    return [draw.randrange(5, VOCABULARY) for _ in range(length)]


def differences(found: Sequence[Answer], right: Sequence[Answer], tolerance: float) -> list[str]:
    """In what answers differ: tokens, and logprobs by more than `tolerance`. Empty for the same."""
    said = []
    for place, (one, other) in enumerate(zip(found, right, strict=True)):
        if one.tokens != other.tokens:
            said.append(f"{place}: tokens {one.tokens} are to be {other.tokens}")
        for at, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            apart = max(abs(ours.get(token, -math.inf) - value) for token, value in theirs.items())
            if not apart <= tolerance:
                said.append(f"{place}: logprobs of token {at} are {apart:g} apart")
    return said


FLOAT32 = 2e-3
"""Prompts are computed in other pieces with the pool than without, so sums are taken in another order: logprobs of
around -5 then differ by some 1e-5. Another block's KV moves them by more than 0.1."""


def assert_same(found: Sequence[Answer], right: Sequence[Answer], tolerance: float = FLOAT32) -> None:
    assert not (said := differences(found, right, tolerance)), "\n".join(said)


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def grown(client: moonpool.Client) -> None:
    """Wait until a node that has just started has all of its pool: until then it may have no room for a store."""
    eventually(lambda: (stats := client.stats()).reserved_bytes == stats.pool_bytes, "the pool is reserved")


def settled(client: moonpool.Client) -> moonpool.NodeStats:
    """Wait until all stores have ended; nothing is held any more then."""
    stats = eventually(
        lambda: (s := client.stats()).reservations == 0 and s.pins == 0 and s.holds == 0 and s, "all let go"
    )
    assert isinstance(stats, moonpool.NodeStats)
    return stats


def stored(client: moonpool.Client, prompt: Prompt, place: int) -> ObjectStat:
    """The object that holds the KV of `prompt`'s tokens at `place`, counted in objects."""
    wanted = prompt[place * OBJECT : (place + 1) * OBJECT]
    (found,) = [stat for stat in client.list() if (n := decode_note(stat.metadata)) is not None and n.tokens == wanted]
    return found


def replace(client: moonpool.Client, stat: ObjectStat, value: bytes) -> None:
    """Put other bytes in an object's place."""
    assert client.remove(stat.key, force=True) is Status.OK
    assert client.put(stat.key, value, metadata=stat.metadata) is Status.OK


def on_copies(engine: Engine, call: Callable[[int, bool], None]) -> None:
    """Have `call(n, load)` run before the n-th object from now on, counted from 0, is copied, in the mover's thread.

    What it raises is a copy that fails.
    """
    mover: Any = engine.worker._mover
    copy, count = mover._copy, itertools.count()

    def copy_then(transfer: Transfer, *, load: bool) -> None:
        call(next(count), load)
        copy(transfer, load=load)

    mover._copy = copy_then


def slowly(seconds: float) -> Callable[[int, bool], None]:
    """For `on_copies`: each object takes so long."""
    return lambda _count, _load: time.sleep(seconds)


def free_blocks(engine: Engine) -> int:
    return int(engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
