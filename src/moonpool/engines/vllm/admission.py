"""What is worth moving: no load that would take longer than prefill, no store that nobody has asked for yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonpool.engines.vllm.settings import Settings
from moonpool.engines.vllm.stats import Tally

PREFILL_TOKENS_MIN = 1024
"""Steps with fewer tokens say little about how fast prefill is: a decode step is bound by the weights."""
SMOOTHING = 0.2
"""Weight of the newest measurement."""
PROBE_EVERY = 50
"""So many loads that seem too slow are refused in a row before one is taken all the same, to measure anew."""
SEEN_MAX = 1 << 20
"""Objects that are remembered as asked for, with `save = "seen"`: 64 MiB of memory at most."""


class Admission:
    """Measured rates, and what follows from them. For the scheduler's thread."""

    def __init__(self, settings: Settings, tally: Tally) -> None:
        self.settings, self.tally = settings, tally
        self.bytes_per_token = 0.0
        """Of all ranks together; known when the workers have told."""
        self.load_bytes_per_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self._under_way_tokens = 0
        self._refused = 0
        self._step: tuple[float, int] | None = None
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    # ---- loads ---------------------------------------------------------------------------------------------------

    def admits(self, tokens: int) -> bool:
        """Whether to load `tokens` tokens: not where computing them is expected to take less time. Until both rates
        have been measured, yes."""
        if self.settings.admission == "always" or not self.load_bytes_per_s or not self.prefill_tokens_per_s:
            return True
        load_s = self.load_s(self._under_way_tokens + tokens)
        if load_s <= self.prefill_s(tokens) or self._refused >= PROBE_EVERY:
            self._refused = 0
            return True
        self._refused += 1
        self.tally.skipped("prefill is faster", tokens)
        return False

    def load_s(self, tokens: int) -> float:
        """How long a load of so many tokens takes, as measured; 0 where nothing has been."""
        return tokens * self.bytes_per_token / self.load_bytes_per_s if self.load_bytes_per_s else 0.0

    def prefill_s(self, tokens: int) -> float:
        """How long computing so many tokens takes, as measured; 0 where nothing has been."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0

    def load_began(self, tokens: int) -> None:
        self._under_way_tokens += tokens

    def load_ended(self, tokens: int) -> None:
        self._under_way_tokens -= tokens

    def loaded(self, size: int, busy_s: float) -> None:
        """Workers have moved `size` bytes in `busy_s` seconds during which something was being loaded."""
        if size and busy_s > 0:
            self.load_bytes_per_s = _smoothed(self.load_bytes_per_s, size / busy_s)

    def step_began(self, scheduled_tokens: int, now_s: float) -> None:
        """A step of so many tokens begins. The time to the next one is what its forward took, if it was a long one."""
        if self._step is not None and self._step[1] >= PREFILL_TOKENS_MIN and now_s > self._step[0]:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, self._step[1] / (now_s - self._step[0]))
        self._step = now_s, scheduled_tokens

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


def _smoothed(before: float, now: float) -> float:
    return now if not before else before + SMOOTHING * (now - before)


