"""What is worth moving: no load that would take longer than prefill, no store that nobody has asked for yet."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from statistics import median

from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.stats import Tally

PREFILL_TOKENS_MIN = 1024
"""Steps with fewer tokens say little about how fast prefill is: a decode step is bound by the weights."""
WARM_UP_STEPS = 1
"""So many long steps aren't measured: the first one compiles kernels."""
SAMPLES = 9
"""A rate is the median of its last measurements, so that no single hiccup turns a decision."""
EXACT = 8
"""A load that took this many times the longest forward beside it: what it waited for that is at most a quarter."""
READMITTED = 0.8
"""Once loads are refused, they have to be this much quicker than prefill: no flapping where both take the same."""
PROBE_EVERY = 50
"""So many loads that seem too slow are refused in a row before one is taken all the same, to measure anew."""
STEPS_KEPT = 64
SEEN_MAX = 1 << 20
"""Objects that are remembered as asked for, with `save = "seen"`: 64 MiB of memory at most."""


class Admission:
    """Measured rates, and what follows from them. For the scheduler's thread.

    A load's cost is its share of the wire, a prefill's its share of the GPU, and both are queued for: so it is the
    costs that are compared, not when either would end. Loads that are each cheaper than their prefill are so together,
    however many wait for the wire; and what would be computed while it is busy would hold up everybody's decoding.
    """

    def __init__(self, settings: Settings, tally: Tally) -> None:
        self.settings, self.tally = settings, tally
        self.bytes_per_token = 0.0
        """Of all ranks together; known when the workers have told."""
        self._load_rates: deque[float] = deque(maxlen=SAMPLES)
        self._prefill_rates: deque[float] = deque(maxlen=SAMPLES)
        self._warm_up = WARM_UP_STEPS
        self._refused = 0
        """Loads in a row."""
        self._under_way: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)
        """Steps whose output hasn't come: when they were scheduled, and how many tokens they compute."""
        self._forwards: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)
        """The last ones: when they ended, how long they took."""
        self._ended_at = 0.0
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    # ---- loads ---------------------------------------------------------------------------------------------------

    @property
    def load_bytes_per_s(self) -> float:
        """What the wire carries, all ranks together; 0 until a load has been measured."""
        return median(self._load_rates) if self._load_rates else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 until it has been measured."""
        return median(self._prefill_rates) if self._prefill_rates else 0.0

    def admits(self, tokens: int) -> bool:
        """Whether to load `tokens` tokens: not where computing them is expected to take less time. Until both rates
        have been measured, yes. What it refuses is for the caller to count, once a request."""
        load_s, prefill_s = self.load_s(tokens), self.prefill_s(tokens)
        if self.settings.admission == "always" or not load_s or not prefill_s:
            return True
        if load_s <= prefill_s * (READMITTED if self._refused else 1.0):
            self._refused = 0
            return True
        self._refused += 1
        if self._refused > PROBE_EVERY:
            self._refused = 1  # this one goes, and those behind it wait for what it tells
            return True
        return False

    def load_s(self, tokens: int) -> float:
        """How long a load of so many tokens has the wire, as measured; 0 where nothing has been."""
        rate = self.load_bytes_per_s
        return tokens * self.bytes_per_token / rate if rate else 0.0

    def prefill_s(self, tokens: int) -> float:
        """How long computing so many tokens takes, as measured; 0 where nothing has been."""
        rate = self.prefill_tokens_per_s
        return tokens / rate if rate else 0.0

    def loaded(self, size: int, load_s: float, began: float, now: float) -> float:
        """A load of `size` bytes that was handed out at `began` has ended; it had the wire for `load_s`. Returns how
        much of that was the load's own doing, and not a wait for a forward: computing would have waited for it too.
        """
        forward_s = self._longest_forward_s(began, now)
        cost_s = max(load_s - 2 * forward_s, 0.0)
        if size and load_s > 0:
            rate = size / load_s
            # What waited for a forward shows how fast the wire is at least, and nothing else.
            if load_s >= EXACT * forward_s or (self._load_rates and rate > self.load_bytes_per_s):
                if self._refused:
                    self._load_rates.clear()  # what was measured before is what a probe is to put right
                self._load_rates.append(rate)
        return cost_s

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step_began(self, scheduled_tokens: int, now: float) -> None:
        """A step of so many tokens is handed to the workers."""
        self._under_way.append((now, scheduled_tokens))

    def step_ended(self, now: float) -> None:
        """The output of the oldest step that is under way has come.

        Its forward ran from when it was handed out, or from when the one before had ended, where that was later: then
        it had been scheduled ahead. What the engine was idle in between is nobody's.
        """
        if not self._under_way:
            return
        began, tokens = self._under_way.popleft()
        took_s = now - max(began, self._ended_at)
        self._ended_at = now
        if not tokens:
            return
        self._forwards.append((now, took_s))
        if tokens < PREFILL_TOKENS_MIN or took_s <= 0:
            return
        if self._warm_up:
            self._warm_up -= 1
        else:
            self._prefill_rates.append(tokens / took_s)

    def _longest_forward_s(self, since: float, now: float) -> float:
        """Of the forwards that have run since then, the one that still does included."""
        longest = max((took_s for ended, took_s in self._forwards if ended > since), default=0.0)
        if self._under_way and self._under_way[0][1]:
            longest = max(longest, now - max(self._under_way[0][0], self._ended_at))
        return longest

    # ---- stores --------------------------------------------------------------------------------------------------

    def asked_for(self, digests: Iterable[bytes]) -> None:
        """A request asks for these objects: with `save = "seen"` that is what makes them worth storing."""
        if self.settings.save != "seen":
            return
        for digest in digests:
            self._seen[digest] = self._seen.pop(digest, 0) + 1
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    def worth_storing(self, digests: Sequence[bytes], places: range) -> list[int]:
        """Which of the objects at `places` are to be stored."""
        if self.settings.save != "seen":
            return list(places)
        return [i for i in places if self._seen.get(digests[i], 0) >= self.settings.seen_times]
