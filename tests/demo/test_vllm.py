"""The demo with vLLM passes on answers that are the same, and on no others. tests/vllm runs it with real engines."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool.demo.prompts import prompts
from moonpool.demo.run import DemoFailed
from moonpool.demo.settings import CONTROL_PROMPT, Settings
from moonpool.demo.vllm.run import Result, result_of
from moonpool.demo.vllm.settings import ALONE, ENGINES, FIRST, SECOND, Answers, prompts_of
from moonpool.demo.vllm.tamper import CONTROLS, tampered
from moonpool.engines.vllm.notes import encode_note
from moonpool.errors import MoonpoolError
from moonpool.keys import KeySpace, fingerprint_state

SETTINGS = Settings()
SIZE = SETTINGS.tokens_per_object


def answers(name: str, *, asked: list[int] | None = None, **changes: Any) -> Answers:
    """What an engine would say that answers prompt n with n, n, …"""
    found = prompts_of(SETTINGS, name) if asked is None else asked
    right = Answers(
        tokens=[[number] * SETTINGS.generated for number in found],
        logprobs=[[-1.0 - number] * SETTINGS.generated for number in found],
        first_token_s=[0.5 if name == ALONE else 0.1] * len(found),
        seconds=1.0,
        computed=100,
        shared=0,
        loaded=0 if name in (ALONE, FIRST) else 900,
        stored_bytes=1 << 20,
    )
    return replace(right, **changes)


def result(**changes: Answers) -> Result:
    """What comes of a demo in which all went well, but for `changes` by the name of the engine or the control."""
    found = {name: answers(name) for name in ENGINES}
    wrong = [[-1.1] * SETTINGS.generated]
    found |= {name: answers(name, asked=[CONTROL_PROMPT], logprobs=wrong) for name in CONTROLS}
    return result_of(SETTINGS, found | changes, {FIRST: "moonpool is off", SECOND: "moonpool is off"})


def test_a_demo_in_which_all_went_well_passes() -> None:
    found = result()
    found.check()
    assert found.ratio == pytest.approx(5)
    assert found.verdicts[SECOND].tokens_compared == 9 * SETTINGS.generated


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_one_other_token_fails(name: str) -> None:
    right = answers(name)
    tokens = [*right.tokens[:-1], [*right.tokens[-1][:-1], 99]]
    with pytest.raises(DemoFailed, match=f"engine '{name}' answers otherwise.*: 1 of"):
        result(**{name: replace(right, tokens=tokens)}).check()


@pytest.mark.parametrize("off", [0.01, float("nan")])
def test_other_logprobs_of_the_same_tokens_fail(off: float) -> None:
    right = answers(SECOND)
    logprobs = [*right.logprobs[:-1], [right.logprobs[-1][0] + off] * SETTINGS.generated]
    with pytest.raises(DemoFailed, match="logprobs are up to"):
        result(**{SECOND: replace(right, logprobs=logprobs)}).check()


def test_rounding_passes() -> None:
    right = answers(SECOND)
    result(**{SECOND: replace(right, logprobs=[[p + 1e-5 for p in row] for row in right.logprobs])}).check()


def test_an_engine_that_stores_nothing_fails_with_what_its_connector_said() -> None:
    with pytest.raises(DemoFailed, match="stored nothing, so it proves nothing: moonpool is off"):
        result(**{FIRST: answers(FIRST, stored_bytes=0)}).check()


@pytest.mark.parametrize("name", [SECOND, *CONTROLS])
def test_an_engine_that_loads_nothing_fails(name: str) -> None:
    asked = None if name == SECOND else [CONTROL_PROMPT]
    with pytest.raises(DemoFailed, match=f"{name}: no token was loaded.*: moonpool is off"):
        result(**{name: answers(name, asked=asked, loaded=0)}).check()


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_that_goes_unnoticed_fails(name: str) -> None:
    with pytest.raises(DemoFailed, match="doesn't notice"):
        result(**{name: answers(name, asked=[CONTROL_PROMPT])}).check()


def test_engine_b_answers_what_a_has_answered_and_more() -> None:
    first, second = prompts_of(SETTINGS, FIRST), prompts_of(SETTINGS, SECOND)
    assert set(first) < set(second)
    assert second == prompts_of(SETTINGS, ALONE) == list(range(len(prompts(SETTINGS))))
    assert CONTROL_PROMPT in first
    assert CONTROL_PROMPT + SETTINGS.questions in first  # the prompt that lends its blocks to a control


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_changes_one_object_and_puts_it_back(control: str) -> None:
    def space(tenant: str) -> KeySpace:
        weights = fingerprint_state({"layer": np.zeros(4, np.float32)})
        return KeySpace(weights=weights, tokens_per_block=SIZE, kv_dtype="float32", layout="any", tenant=tenant)

    one, other = prompts(SETTINGS)[CONTROL_PROMPT], prompts(SETTINGS)[CONTROL_PROMPT + SETTINGS.questions]
    with moonpool.connect("embedded:64MiB") as client:
        draw = np.random.default_rng(0)
        for tenant in ("demo", "somebody"):
            client.declare(space(tenant))
            for number, prompt in enumerate((one, other)):
                for place in range(len(prompt) // SIZE):
                    note = encode_note(b"", prompt[place * SIZE : (place + 1) * SIZE])
                    key = space(tenant).key(bytes([number, place]) + bytes(30))
                    client.put(key, draw.bytes(64 * SETTINGS.layers), metadata=note)
        before = {stat.key: client.get(stat.key) for stat in client.list()}
        with tampered(client, "demo", control, SETTINGS, one, other):
            meanwhile = {stat.key: client.get(stat.key) for stat in client.list()}
        assert before == {stat.key: client.get(stat.key) for stat in client.list()}
        (changed,) = (key for key in before if before[key] != meanwhile[key])
        assert changed.startswith(space("demo").digest)
        with (
            pytest.raises(MoonpoolError, match="has no object"),
            tampered(client, "nobody", control, SETTINGS, one, other),
        ):
            pass


def test_what_the_demo_needs_is_said_in_one_line() -> None:
    for arguments, said in (
        (("--engine", "sglang"), "error: option 'engine': 'sglang' is not one of transformers, vllm\n"),
        (("--engine", "vllm", "--dtype", "bfloat16"), "float32" if find_spec("vllm") else "make demo-vllm"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moonpool", "demo", *arguments], capture_output=True, text=True, timeout=110
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
