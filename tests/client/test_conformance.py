"""Every kind of client keeps the same promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import moonpool
from moonpool.testing.conformance import ClientConformance


class TestOverASocket(ClientConformance):
    @pytest.fixture
    def client(self, client: moonpool.Client) -> moonpool.Client:
        return client


class TestEmbedded(ClientConformance):
    @pytest.fixture
    def client(self) -> Iterator[moonpool.Client]:
        with moonpool.connect("embedded:32MiB") as client:
            yield client
