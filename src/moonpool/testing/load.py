"""One client process under load, which checks every byte that it sees: `python -m moonpool.testing.load URL --seed 1`.

It puts, gets, removes, holds views for a while, fills reservations slowly, and goes on when the node is gone for a
while. It ends with SIGTERM, having given all back, or with status 3 and one line at the first wrong byte.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import moonpool
from moonpool import Group, Reservations, Status, Views
from moonpool.client.link import SocketLink
from moonpool.testing.values import WrongBytes, generation_of, value_of

WRONG_BYTES_EXIT = 3
CONNECT_S = 30.0
VIEWS_MAX = 6
RESERVATIONS_MAX = 3
KEYS = 160
SIZES = (16, 4000, 4096, 60_000, 66_000, 300_000, 1_000_000, 3_000_000)


@dataclass
class Filling:
    """A reservation that is half filled: the first half of each extent holds the value's first half."""

    reservations: Reservations
    generation: int

    def check(self) -> None:
        for extent in self.reservations:
            if extent.buffer is not None:
                half = len(extent.buffer) // 2
                expected = value_of(extent.key, self.generation, len(extent.buffer))[:half]
                if (extent.buffer[:half] != expected).any():
                    raise WrongBytes(f"{extent.key!r}: somebody else wrote into a reserved extent")

    def fill(self) -> None:
        for extent in self.reservations:
            if extent.buffer is not None:
                half = len(extent.buffer) // 2
                extent.buffer[half:] = value_of(extent.key, self.generation, len(extent.buffer))[half:]
        for extent in self.reservations:
            if extent.buffer is not None and generation_of(extent.key, extent.buffer) != self.generation:
                raise WrongBytes(f"{extent.key!r}: another generation stands in a reserved extent")


class Load:
    """The work of one client; `step` does one thing at random. What it holds is checked at every step."""

    def __init__(self, client: moonpool.Client, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)
        self.generation = seed << 20
        self.views: list[tuple[list[str], Views]] = []
        self.fillings: list[Filling] = []
        self.holds: list[tuple[str, list[str]]] = []
        self.target = bytearray(max(SIZES))

    def step(self) -> None:
        """Raises `WrongBytes`, or what the client raises while there is no node."""
        self.check_held()
        choice = self.random.choice(
            (self.put, self.put, self.get, self.get, self.look, self.look, self.reserve, self.finish, self.let_go,
             self.remove, self.hold, self.cut)
        )  # fmt: skip
        choice()

    def keys(self, most: int = 4) -> list[str]:
        return [f"key {n}" for n in self.random.sample(range(KEYS), self.random.randint(1, most))]

    def check_held(self) -> None:
        for keys, views in self.views:
            for key, array in zip(keys, views, strict=True):
                if array is not None:
                    generation_of(key, array)
        for filling in self.fillings:
            filling.check()

    def put(self) -> None:
        self.generation += 1
        keys, size = self.keys(), self.random.choice(SIZES)
        self.client.put_many(keys, [value_of(key, self.generation, size) for key in keys], wait_s=0.05)

    def get(self) -> None:
        keys = self.keys()
        statuses = self.client.get_many_into(keys[:1], [self.target])
        if statuses[0] is Status.OK:
            generation_of(keys[0], memoryview(self.target)[: statuses.sizes[0]])

    def look(self) -> None:
        keys = self.keys()
        views = self.client.view_many(keys)
        self.views.append((keys, views))
        if len(self.views) > VIEWS_MAX:
            self.views.pop(0)[1].close()

    def reserve(self) -> None:
        self.generation += 1
        keys = self.keys(2)
        size = self.random.choice(SIZES)
        filling = Filling(self.client.reserve_many(keys, [size] * len(keys), wait_s=0.05), self.generation)
        for extent in filling.reservations:
            if extent.buffer is not None:
                extent.buffer[: size // 2] = value_of(extent.key, self.generation, size)[: size // 2]
        self.fillings.append(filling)
        if len(self.fillings) > RESERVATIONS_MAX:
            self.finish()

    def finish(self) -> None:
        if self.fillings:
            filling = self.fillings.pop(0)
            filling.check()
            if self.random.random() < 0.2:
                filling.reservations.abort()
            else:
                filling.fill()
                filling.reservations.commit()

    def let_go(self) -> None:
        if self.views:
            self.views.pop(self.random.randrange(len(self.views)))[1].close()

    def remove(self) -> None:
        self.client.remove_many(self.keys(2))

    def cut(self) -> None:
        """Lose the connection, as by a proxy that is restarted, with whatever is under way on it."""
        link = self.client.link
        if isinstance(link, SocketLink) and self.random.random() < 0.3:
            with suppress(AttributeError, OSError):
                link._channel.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def hold(self) -> None:
        if self.holds and self.random.random() < 0.5:
            name, keys = self.holds.pop(0)
            with self.client.adopt(name) as views:
                # Empty where the node was restarted meanwhile; None where somebody removed the object.
                for key, array in zip(keys, views, strict=False):
                    if array is not None:
                        generation_of(key, array)
                array = None
            self.client.release_hold(name)
            return
        keys = self.keys()
        self.generation += 1
        found = self.client.match([Group(keys)], hold=f"hold {self.generation}")
        if found.hold:
            self.holds.append((found.hold, keys))

    def end(self) -> None:
        """Give everything back, checking it once more."""
        self.check_held()
        while self.fillings:
            self.fillings.pop().reservations.abort()
        while self.views:
            self.views.pop()[1].close()
        while self.holds:
            self.client.release_hold(self.holds.pop()[0])


def connected(url: str, name: str) -> moonpool.Client:
    """A client; waits for the node to be there."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return moonpool.connect(url, name=name, timeout_s=30)
        except moonpool.NodeUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps; 0 = go on until SIGTERM")
    options = parser.parse_args()
    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    with connected(options.url, f"load {options.seed}") as client:
        load = Load(client, options.seed)
        print("ready", flush=True)
        steps = 0
        try:
            while not ending and (not options.steps or steps < options.steps):
                steps += 1
                try:
                    load.step()
                except moonpool.NodeUnavailable:
                    time.sleep(0.02)
            load.end()
        except WrongBytes as error:
            print(f"wrong bytes (seed {options.seed}, step {steps}): {error}", file=sys.stderr, flush=True)
            raise SystemExit(WRONG_BYTES_EXIT) from None


if __name__ == "__main__":
    main()
