"""Fixtures that all tests share: real nodes, started and ended with the test or module that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import moonpool
from moonpool.testing.node import RunningNode, eventually, running_node

pytest.register_assert_rewrite(
    "moonpool.testing.conformance", "moonpool.testing.conformance_node", "moonpool.testing.space_model"
)


@pytest.fixture(scope="module")
def shared_node() -> Iterator[RunningNode]:
    """A node of 32 MiB for all tests of a module. They leave it running, and may leave objects in it."""
    with running_node("32MiB") as node:
        yield node


@pytest.fixture
def client(shared_node: RunningNode) -> Iterator[moonpool.Client]:
    """A client of the module's node, which is empty and switched on."""
    with shared_node.connect() as client:
        client.set_mode("on")
        client.clear()
        eventually(lambda: client.stats().live_bytes == 0, "the pool is empty")
        yield client


@pytest.fixture
def node() -> Iterator[RunningNode]:
    """A node of 32 MiB for this test alone, to be killed, stopped and damaged."""
    with running_node("32MiB") as node:
        yield node
