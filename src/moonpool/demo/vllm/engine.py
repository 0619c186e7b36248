"""What a fresh process of the demo does: start a vLLM engine, answer prompts, report.

Run as `python -m moonpool.demo.vllm.engine` with a `Job` as JSON on standard input. Writes `Answers`, by the name of
the engine or the control, to `answers.json` in the job's folder; vLLM has the output for itself.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

import moonpool
from moonpool.demo.model import build_model
from moonpool.demo.prompts import VOCABULARY, prompts
from moonpool.demo.settings import CONTROL_PROMPT
from moonpool.demo.vllm.settings import Answers, Job
from moonpool.demo.vllm.tamper import tampered
from moonpool.errors import MoonpoolError

BLOCK_TOKENS = 32
"""vLLM's kernels for CPUs want a multiple of this."""
STEP_TOKENS = 2048
SETTLE_S = 0.3
"""How long nothing may be under way before all is stored."""
STORED_TIMEOUT_S = 60.0


class Engine:
    """One vLLM engine in this process, and the demo's prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prompts = prompts(job.settings)
        self._client = moonpool.connect(job.url, name="demo") if job.url else None
        began = time.perf_counter()
        self._llm = LLM(
            model=str(_model(job)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=job.settings.dtype,
            block_size=BLOCK_TOKENS,
            max_model_len=max(map(len, self._prompts)) + job.settings.generated,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=len(self._prompts),
            kv_cache_memory_bytes=job.settings.pool_bytes,
            enable_prefix_caching=True,
            disable_log_stats=False,  # counts where tokens came from
            kv_transfer_config=_connector(job) if job.url else None,
        )
        self._started_s = time.perf_counter() - began
        # The first steps choose kernels and measure; neither the pool nor its absence is to blame for that.
        draw = random.Random(0)
        self._generate([[draw.randrange(VOCABULARY) for _ in tokens] for tokens in self._prompts[:3]])

    def run(self) -> dict[str, Answers]:
        """Answer the job's prompts; then, under each control, one of them."""
        found = {self._job.name: self._answer([self._prompts[number] for number in self._job.prompts])}
        if self._client is None:
            return found
        one = self._prompts[CONTROL_PROMPT]
        other = self._prompts[CONTROL_PROMPT + self._job.settings.questions]
        for control in self._job.controls:
            with tampered(self._client, self._job.tenant, control, self._job.settings, one, other):
                if not self._llm.reset_prefix_cache():
                    raise MoonpoolError("vLLM doesn't let go of its prefix cache, so that a control proves nothing")
                found[control] = self._answer([one])
        self._client.close()
        return found

    def _answer(self, asked: list[list[int]]) -> Answers:
        before, written = self._sources(), self._written()
        began = time.perf_counter()
        outputs = self._generate(asked)
        seconds = time.perf_counter() - began
        sources = {source: count - before.get(source, 0) for source, count in self._sources().items()}
        return Answers(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            logprobs=[_logprobs(output.outputs[0]) for output in outputs],
            first_token_s=[output.metrics.first_token_latency for output in outputs],
            seconds=seconds,
            computed=sources.get("local_compute", 0),
            shared=sources.get("local_cache_hit", 0),
            loaded=sources.get("external_kv_transfer", 0),
            stored_bytes=self._written() - written,
            started_s=self._started_s,
        )

    def _generate(self, asked: list[list[int]]) -> list[Any]:
        sampling = SamplingParams(
            max_tokens=self._job.settings.generated, temperature=0, logprobs=0, detokenize=False, ignore_eos=True
        )
        given = [TokensPrompt(prompt_token_ids=tokens) for tokens in asked]
        return list(self._llm.generate(given, sampling, use_tqdm=False))

    def _sources(self) -> dict[str, int]:
        """Tokens of prompts so far, by where their KV cache came from, in vLLM's words."""
        counters = [metric for metric in self._llm.get_metrics() if metric.name == "vllm:prompt_tokens_by_source"]
        return {metric.labels["source"]: int(metric.value) for metric in counters}

    def _written(self) -> int:
        """Bytes that the pool has been given so far, once nothing is under way any more."""
        if self._client is None:
            return 0
        deadline = time.monotonic() + STORED_TIMEOUT_S
        idle_since, written = time.monotonic(), -1
        while time.monotonic() - idle_since < SETTLE_S:
            stats = self._client.stats()
            if stats.reservations or stats.bytes_written != written:
                idle_since, written = time.monotonic(), stats.bytes_written
            if time.monotonic() > deadline:
                raise MoonpoolError(f"stores were still under way after {STORED_TIMEOUT_S:g} s")
            time.sleep(0.02)
        return written


def _model(job: Job) -> Path:
    """The folder of the demo's transformer, written by the first engine that asks."""
    folder = Path(job.folder) / "moonpool-demo"
    if not folder.exists():
        build_model(job.settings).save_pretrained(folder)
    return folder


def _connector(job: Job) -> KVTransferConfig:
    size = job.settings.tokens_per_object
    return KVTransferConfig(
        kv_connector="MoonpoolConnector",
        kv_connector_module_path="moonpool.engines.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={
            "url": job.url,
            "tokens_per_object": size,
            "load_min_tokens": size,
            "tenant": job.tenant,
        },
    )


def _logprobs(completion: Any) -> list[float]:
    return [place[token].logprob for token, place in zip(completion.token_ids, completion.logprobs, strict=True)]


def main() -> None:
    """Do the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    answers = Engine(job).run()
    (Path(job.folder) / "answers.json").write_bytes(msgspec.json.encode(answers))


if __name__ == "__main__":
    main()
