from __future__ import annotations

import pytest

from moonpool.engines.vllm.admission import PROBE_EVERY, SAMPLES, Admission
from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.stats import Tally

PREFILL = 10_000.0
"""Tokens a second of the engine that these tests pretend to have."""
BYTES_PER_TOKEN = 1000.0


class Engine:
    """An engine of a clock and an admission."""

    def __init__(self, admission: str = "auto") -> None:
        self.admission = Admission(Settings(admission=admission), Tally())  # type: ignore[arg-type]
        self.admission.bytes_per_token = BYTES_PER_TOKEN
        self.now = 100.0

    def step(self, tokens: int = 4096, took_s: float | None = None) -> None:
        """One step, whose output is waited for."""
        self.admission.step_began(tokens, self.now)
        self.now += tokens / PREFILL if took_s is None else took_s
        self.admission.step_ended(self.now)

    def load(self, tokens: int, tokens_per_s: float) -> float:
        """A load with nothing beside it; returns what it cost."""
        began, took_s = self.now, tokens / tokens_per_s
        self.now += took_s
        return self.admission.loaded(int(tokens * BYTES_PER_TOKEN), took_s, began, self.now)

    def measured(self, load_tokens_per_s: float) -> Engine:
        for _ in range(SAMPLES):
            self.step()
            self.load(1000, load_tokens_per_s)
        return self


def test_until_both_rates_are_measured_everything_is_loaded() -> None:
    engine = Engine()
    assert engine.admission.admits(10_000)
    engine.load(1000, 1.0)
    assert engine.admission.admits(10_000)
    assert Engine().measured(1.0).admission.admits(10_000) is False


def test_a_load_slower_than_prefill_is_refused_and_a_quicker_one_taken() -> None:
    assert not Engine().measured(PREFILL * 0.9).admission.admits(10_000)
    assert Engine().measured(PREFILL * 1.1).admission.admits(10_000)


def test_what_always_is_set_to_is_always_loaded() -> None:
    assert Engine("always").measured(1.0).admission.admits(10_000)


def test_a_wire_that_many_loads_wait_for_is_still_the_cheaper_way() -> None:
    engine = Engine().measured(PREFILL * 2)
    # Thirty loads at once: the last one ends long after its own prefill would have, had the GPU been free for it. It
    # wouldn't: thirty prefills take twice as long as thirty loads.
    assert all(engine.admission.admits(10_000) for _ in range(30))


def test_loads_in_flight_together_are_measured_by_what_the_wire_carries() -> None:
    engine = Engine()
    began = engine.now
    for i in range(1, 11):  # handed out at once, each has the wire for 0.1 s
        engine.admission.loaded(1_000_000, 0.1, began, began + i * 0.1)
    assert engine.admission.load_bytes_per_s == pytest.approx(1e7)


def test_once_refused_loads_must_be_clearly_quicker_to_be_taken_again() -> None:
    engine = Engine().measured(PREFILL * 0.9)
    assert not engine.admission.admits(1000)
    engine.load(1000, PREFILL * 1.1)  # a hair quicker than prefill
    assert not engine.admission.admits(1000)
    engine.load(1000, PREFILL * 1.5)
    assert engine.admission.admits(1000)
    for _ in range(SAMPLES):
        engine.load(1000, PREFILL * 1.1)
    assert engine.admission.admits(1000)  # and is enough to go on


def test_of_many_refused_one_is_tried_and_what_it_tells_counts_alone() -> None:
    engine = Engine().measured(PREFILL * 0.1)
    answers = [engine.admission.admits(1000) for _ in range(PROBE_EVERY + 1)]
    assert answers == [False] * PROBE_EVERY + [True]
    assert not engine.admission.admits(1000)  # the probe is still under way
    engine.load(1000, PREFILL * 10)
    assert engine.admission.admits(1000)


def test_a_single_hiccup_turns_no_decision() -> None:
    engine = Engine().measured(PREFILL * 2)
    engine.load(1000, PREFILL / 100)
    assert engine.admission.admits(1000)


# ---- how fast prefill is ---------------------------------------------------------------------------------------------


def test_prefill_is_measured_on_long_steps_alone() -> None:
    engine = Engine()
    for _ in range(5):
        engine.step()
        engine.step(tokens=8, took_s=0.02)
    assert engine.admission.prefill_tokens_per_s == pytest.approx(PREFILL)


def test_the_first_long_step_compiles_kernels_and_says_nothing() -> None:
    engine = Engine()
    engine.step(took_s=30.0)
    assert engine.admission.prefill_tokens_per_s == 0
    engine.step()
    assert engine.admission.prefill_tokens_per_s == pytest.approx(PREFILL)


def test_an_idle_engine_is_not_a_slow_one() -> None:
    engine = Engine()
    for _ in range(5):
        engine.step()
        engine.now += 60.0
    assert engine.admission.prefill_tokens_per_s == pytest.approx(PREFILL)


def test_steps_scheduled_ahead_are_not_counted_twice() -> None:
    engine = Engine()
    took_s = 4096 / PREFILL
    engine.admission.step_began(4096, engine.now)
    for _ in range(5):  # the next step is handed out while this one runs
        engine.admission.step_began(4096, engine.now + 0.01)
        engine.now += took_s
        engine.admission.step_ended(engine.now)
    assert engine.admission.prefill_tokens_per_s == pytest.approx(PREFILL)


def test_an_output_without_a_step_is_ignored() -> None:
    engine = Engine()
    engine.admission.step_ended(engine.now)
    engine.step()
    engine.step()
    assert engine.admission.prefill_tokens_per_s == pytest.approx(PREFILL)


# ---- loads beside forwards -------------------------------------------------------------------------------------------


def test_a_load_that_waited_for_a_forward_does_not_make_the_wire_slow() -> None:
    engine = Engine().measured(PREFILL * 10)
    rate = engine.admission.load_bytes_per_s
    for _ in range(SAMPLES):
        began = engine.now
        engine.step()  # 0.41 s, and the load of 0.01 s is seen when it has ended
        cost_s = engine.admission.loaded(1_000_000, engine.now - began, began, engine.now)
        assert cost_s == 0
    assert engine.admission.load_bytes_per_s == rate


def test_a_forward_that_is_still_running_is_taken_into_account() -> None:
    engine = Engine()
    began = engine.now
    engine.admission.step_began(4096, began)
    assert engine.admission.loaded(1_000_000, 0.4, began, began + 0.4) == 0
    assert engine.admission.load_bytes_per_s == 0


def test_a_long_load_beside_short_decode_steps_is_measured() -> None:
    engine = Engine()
    began = engine.now
    for _ in range(100):
        engine.step(tokens=8, took_s=0.01)
    cost_s = engine.admission.loaded(1_000_000, 1.0, began, engine.now)
    assert cost_s == pytest.approx(0.98)
    assert engine.admission.load_bytes_per_s == pytest.approx(1e6)


def test_a_wait_shows_at_least_how_fast_the_wire_is() -> None:
    engine = Engine().measured(PREFILL * 0.5)
    for _ in range(SAMPLES):
        began = engine.now
        engine.step(took_s=0.1)
        engine.admission.loaded(10_000_000, 0.1, began, engine.now)
    assert engine.admission.load_bytes_per_s == pytest.approx(1e8)


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_what_was_asked_for_often_enough_is_worth_storing() -> None:
    admission = Admission(Settings(save="seen", seen_times=2), Tally())
    digests = [b"a", b"b"]
    admission.asked_for(digests)
    assert admission.worth_storing(digests, range(2)) == []
    admission.asked_for(digests[:1])
    assert admission.worth_storing(digests, range(2)) == [0]


def test_without_that_setting_everything_is() -> None:
    assert Admission(Settings(), Tally()).worth_storing([b"a", b"b"], range(1, 2)) == [1]
