"""Views: their bytes stay as they are for as long as anything made from them lives."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool.testing.node import eventually
from moonpool.testing.values import generation_of, value_of

torch = pytest.importorskip("torch")
MIB = 1 << 20


def overwrite(client: moonpool.Client) -> None:
    """Everything else in the pool, as far as the node lets us."""
    for _ in range(2):
        client.clear()
        keys = [f"other {i}" for i in range(client.pool_bytes // MIB)]
        client.put_many(keys, [np.full(MIB, 255, np.uint8)] * len(keys), wait_s=0)


def derived(array: Any) -> dict[str, Any]:
    """Whatever can be made of a view without a copy, each with the place of its first byte."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that it can't mark as read-only
        return {
            "slice": (array[100:], 100),
            "slice of a slice": (array[50:][50:], 100),
            "np.frombuffer": (np.frombuffer(array, np.uint8, offset=16), 16),
            "memoryview": (memoryview(array)[8:], 8),
            "other dtype": (array.view(np.float32)[2:], 8),
            "reshaped": (array.reshape(16, -1)[1], len(array) // 16),
            "transposed": (array.reshape(2, -1).T[:, 0], 0),
            "torch.from_numpy": (torch.from_numpy(array)[64:], 64),
            "torch.frombuffer": (torch.frombuffer(array, dtype=torch.uint8)[32:], 32),
            "torch.frombuffer of a slice": (torch.frombuffer(memoryview(array)[4096:], dtype=torch.float16)[4:], 4104),
            "torch.asarray": (torch.asarray(array).view(torch.bfloat16).reshape(-1, 8)[1:], 16),
        }


KINDS = list(derived(np.zeros(MIB, np.uint8)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_of_a_view_keeps_its_bytes_past_its_end(client: moonpool.Client, kind: str) -> None:
    client.put("key", value_of("key", 1, MIB))
    expected = value_of("key", 1, MIB)
    with client.view("key") as views:
        kept, start = derived(views[0])[kind]
    client.remove("key")
    gc.collect()
    overwrite(client)
    if isinstance(kept, torch.Tensor):
        found = kept.contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        found = np.frombuffer(np.ascontiguousarray(kept).tobytes(), np.uint8)
    assert np.array_equal(found, expected[start : start + len(found)])
    assert len(found) >= 4096
    assert client.stats().pins == 1, "it holds the object"
    del kept, found
    gc.collect()
    eventually(lambda: client.stats().pins == 0, "and the last reference gone, nothing does")


def test_a_view_dropped_without_its_context_is_given_back_soon(client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, MIB))
    client.view("key")
    eventually(lambda: client.stats().pins == 0)
    cycle: list[Any] = [client.view("key")[0]]
    cycle.append(cycle)
    del cycle
    gc.collect()
    eventually(lambda: client.stats().pins == 0)


def test_the_same_object_viewed_twice_is_held_until_both_are_gone(client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, MIB))
    first, second = client.view_many(["key", "key"]), client.view("key")
    first.close()
    client.remove("key")
    overwrite(client)
    assert generation_of("key", second[0]) == 1
    second.close()
    assert client.stats().pins == 0


def test_views_dropped_by_many_threads_are_all_given_back(client: moonpool.Client) -> None:
    keys = [f"key {i}" for i in range(50)]
    client.put_many(keys, [value_of(key, 1, 1000) for key in keys])

    def work() -> None:
        for _ in range(40):
            views = client.view_many(keys)
            arrays = list(views)
            del views
            assert generation_of(keys[7], arrays[7]) == 1
            del arrays

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: client.stats().pins == 0)


def test_ten_thousand_views_at_once_are_given_back_in_messages_of_bounded_length(client: moonpool.Client) -> None:
    client.put("key", b"value")
    views = [client.view_many(["key"] * 1000) for _ in range(10)]
    assert client.stats().pins == 1
    views.clear()
    eventually(lambda: client.stats().pins == 0)
    assert client.stats().stale_ids == 0


def test_a_read_only_client_reads_and_cannot_write(client: moonpool.Client) -> None:
    client.put("key", value_of("key", 1, 100_000))
    with moonpool.connect(client.url, read_only=True) as reader:
        assert generation_of("key", reader.get("key")) == 1
        with reader.view("key") as views:
            assert generation_of("key", views[0]) == 1
        assert not reader.link.attachment.pool.writable
        for call in (
            lambda: reader.put("new", b"value"),
            lambda: reader.reserve("new", 10),
            lambda: reader.remove("key"),
            lambda: reader.clear(),
            lambda: reader.purge(older_than_s=1),
            lambda: reader.pin_many(["key"]),
            lambda: reader.set_mode("off"),
        ):
            with pytest.raises(moonpool.ReadOnly):
                call()


def test_torch_tensors_are_values_and_targets(client: moonpool.Client) -> None:
    value = torch.arange(50_000, dtype=torch.float32).to(torch.bfloat16).reshape(100, -1)
    assert client.put("key", value) is moonpool.Status.OK
    target = torch.zeros_like(value)
    assert client.get_into("key", target) == 100_000
    assert torch.equal(value, target)
    with pytest.raises(moonpool.InvalidRequest, match="contiguous"):
        client.put("other", value.T)
    with pytest.raises(moonpool.InvalidRequest, match="meta"):
        client.put("other", value.to("meta"))
