"""The feed: every change numbered, and handed to whoever subscribed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moonpool.wire.messages import Event


class Subscriber:
    """One reader's queue of events. Bounded: a reader that falls behind loses them, and is told so."""

    def __init__(self, events_max: int, wake: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._max = events_max
        self._lagged = False
        self._wake = wake

    def add(self, event: Event) -> None:
        if self._lagged:
            return
        if len(self._events) >= self._max:
            self._events.clear()
            self._lagged = True
            self._events.append(Event(event.sequence, "lagged"))
        else:
            self._events.append(event)
        if len(self._events) == 1:
            self._wake()

    def take(self, most: int) -> list[Event]:
        """The next events, oldest first, removed from the queue."""
        events = self._events
        return [events.popleft() for _ in range(min(most, len(events)))]

    @property
    def ended(self) -> bool:
        """True once it has lagged and been told: nothing more comes."""
        return self._lagged and not self._events


class Feed:
    """Numbers changes (`sequence` is the last one's) and copies them to subscribers. Single-threaded.

    Without a subscriber a change costs one addition.
    """

    def __init__(self, events_max: int) -> None:
        self.sequence = 0
        self.subscribers: set[Subscriber] = set()
        self._max = events_max

    def subscribe(self, wake: Callable[[], None]) -> Subscriber:
        """A new queue that receives all changes from now on; `wake` is called when it stops being empty."""
        subscriber = Subscriber(self._max, wake)
        self.subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self.subscribers.discard(subscriber)

    def publish(
        self, kind: str, key: bytes = b"", size: int = 0, space: int = 0, reason: str = "", metadata: bytes = b""
    ) -> None:
        """Number one change and queue it. Callers skip building its fields when `subscribers` is empty."""
        self.sequence += 1
        if self.subscribers:
            event = Event(self.sequence, kind, key, size, space, reason, metadata)
            for subscriber in self.subscribers:
                subscriber.add(event)
