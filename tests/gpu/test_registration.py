"""The pool is registered in order and in the background, no further than it is reserved; a refusal is said once."""

from __future__ import annotations

import logging
from random import Random

import pytest

from moonpool.folder.mapping import Mapping
from moonpool.gpu.cudart import REGISTER_PORTABLE, REGISTER_READ_ONLY, CudaError
from moonpool.gpu.registration import Registration
from moonpool.testing.node import eventually
from tests.gpu.fake_cuda import FakeCuda

CHUNK = 1 << 20


class Refusing(FakeCuda):
    """Lets some chunks be registered, and no more."""

    def __init__(self, allowed: int) -> None:
        super().__init__(Random(0))
        self.allowed = allowed

    def register(self, address: int, length: int, flags: int) -> None:
        if self.allowed == 0:
            raise CudaError("cudaHostRegister", 2, "out of memory")
        self.allowed -= 1
        super().register(address, length, flags)


def test_chunks_are_registered_in_order_and_given_back() -> None:
    cuda, mapping = FakeCuda(Random(0)), Mapping.anonymous(2 * CHUNK + 4096)
    registration = Registration(mapping, device=5, chunk_bytes=CHUNK, cuda=cuda)
    assert registration.done.wait(10)
    start = mapping.bytes.ctypes.data
    assert cuda.log == [
        "enter_thread 5",
        f"register {start} {CHUNK} {REGISTER_PORTABLE}",
        f"register {start + CHUNK} {CHUNK} {REGISTER_PORTABLE}",
        f"register {start + 2 * CHUNK} 4096 {REGISTER_PORTABLE}",
    ]
    assert registration.frontier_bytes == mapping.size
    assert registration.refused is None
    registration.close()
    registration.close()
    assert sorted(cuda.log[4:]) == sorted(f"unregister {start + i * CHUNK}" for i in range(3))
    assert registration.frontier_bytes == 0
    assert not any(piece.registered for piece in registration.split(0, CHUNK))


def test_it_follows_what_the_node_has_reserved() -> None:
    reserved = 0
    mapping = Mapping.anonymous(3 * CHUNK)
    registration = Registration(mapping, chunk_bytes=CHUNK, cuda=FakeCuda(Random(0)), reserved_bytes=lambda: reserved)
    reserved = CHUNK + 4096
    eventually(lambda: registration.frontier_bytes == CHUNK, "the first chunk is registered")
    assert not registration.done.wait(0.05)
    assert [piece.registered for piece in registration.split(CHUNK - 10, 20)] == [True, False]
    reserved = 3 * CHUNK
    assert registration.done.wait(10)
    assert [piece.registered for piece in registration.split(CHUNK - 10, 20)] == [True, True]
    registration.close()


def test_closing_stops_it_while_it_waits_for_the_node() -> None:
    registration = Registration(
        Mapping.anonymous(CHUNK), chunk_bytes=CHUNK, cuda=FakeCuda(Random(0)), reserved_bytes=lambda: 0
    )
    registration.close()
    assert registration.done.is_set()


def test_a_refusal_is_said_once_and_what_is_registered_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moonpool.gpu"):
        registration = Registration(Mapping.anonymous(4 * CHUNK), chunk_bytes=CHUNK, cuda=Refusing(2))
        assert registration.done.wait(10)
    assert registration.refused == "cudaHostRegister: out of memory (CUDA error 2)"
    assert registration.frontier_bytes == 2 * CHUNK
    (record,) = caplog.records
    assert "can't be registered with CUDA beyond 2.00 MiB of 4.00 MiB" in record.getMessage()
    registration.close()


def test_a_read_only_mapping_is_registered_as_such() -> None:
    cuda, mapping = FakeCuda(Random(0)), Mapping.anonymous(CHUNK)
    mapping.writable = False
    registration = Registration(mapping, cuda=cuda)
    assert registration.done.wait(10)
    assert cuda.log[1].endswith(f" {REGISTER_PORTABLE | REGISTER_READ_ONLY}")
    registration.close()


def test_chunks_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="1000 is no multiple of 4096"):
        Registration(Mapping.anonymous(CHUNK), chunk_bytes=1000, cuda=FakeCuda(Random(0)))
