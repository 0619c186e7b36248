"""A model behind a `PrefixCache` says what it says without one, whatever the store does."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import moonpool
from moonpool.demo.node import temporary_node
from moonpool.errors import NodeUnavailable
from moonpool.status import Status

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moonpool.engines.transformers import PrefixCache  # noqa: E402
from moonpool.engines.transformers.support import CACHE_ARGUMENT  # noqa: E402

BLOCK = 16


class Store:
    """A client whose calls can be replaced one by one; all others go to the real one."""

    def __init__(self, client: Any, **replaced: Any) -> None:
        self._client = client
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def plain(model: Any, tokens: list[int], count: int = 8, **arguments: Any) -> list[int]:
    output = model.generate(torch.tensor([tokens]), max_new_tokens=count, **{"do_sample": False, **arguments})
    return output[0].tolist()


def through(cache: PrefixCache, tokens: list[int], count: int = 8, **arguments: Any) -> list[int]:
    output = cache.generate(tokens, max_new_tokens=count, **{"do_sample": False, **arguments})
    return output[0].tolist()


def wrap(model: Any, client: Any, **arguments: Any) -> PrefixCache:
    return PrefixCache(model, client, **{"tokens_per_object": BLOCK, **arguments})


def last_logits(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[:, -1]


def test_generates_the_same_tokens_when_nothing_and_when_everything_is_stored(
    model: Any, client: Any, prompt: list[int]
) -> None:
    expected = plain(model, prompt)
    first, second = wrap(model, client), wrap(model, client)

    assert through(first, prompt) == expected
    assert first.last is not None
    # 107 tokens have KV cache at the end (the last one generated has none): 6 blocks of 16.
    assert (first.last.loaded, first.last.computed, first.last.stored, first.last.generated) == (
        0,
        100,
        96,
        8,
    )

    assert through(second, prompt) == expected
    assert second.last is not None
    assert (second.last.loaded, second.last.computed, second.last.stored) == (96, 4, 0)
    assert second.last.bytes_loaded == 6 * second.layout.object_bytes
    assert str(second.last).startswith("100 tokens: 96 loaded, 4 computed, 0 stored, 8 generated; query ")
    assert first.failures == second.failures == 0
    assert [info.description for info in client.spaces() if info.digest == first.space.digest]


def test_prefill_gives_the_logits_and_the_cache_that_the_model_gives(
    model: Any, client: Any, prompt: list[int]
) -> None:
    expected = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), **{CACHE_ARGUMENT: expected}).logits[:, -1]
    cache = wrap(model, client)
    cache.prefill(prompt)
    loaded = cache.prefill(torch.tensor([prompt]))

    assert cache.last is not None
    assert cache.last.loaded == 96
    torch.testing.assert_close(loaded.logits, logits, rtol=1e-4, atol=1e-5)
    assert loaded.past_key_values.get_seq_length() == 100
    for mine, other in zip(loaded.past_key_values.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kv_cache_comes_back_bit_by_bit_in_every_dtype(
    make_model: Any, client: Any, prompt: list[int], dtype: str
) -> None:
    model = make_model(dtype=getattr(torch, dtype))
    cache = wrap(model, client)
    stored = cache.prefill(prompt).past_key_values
    loaded = cache.prefill(prompt).past_key_values

    assert cache.layout.dtype == dtype
    assert cache.last is not None
    assert cache.last.loaded == 96
    for before, after in zip(stored.layers, loaded.layers, strict=True):
        assert after.keys.dtype is getattr(torch, dtype)
        assert torch.equal(before.keys[:, :, :96], after.keys[:, :, :96])
        assert torch.equal(before.values[:, :, :96], after.values[:, :, :96])


def test_objects_lie_in_the_stated_layout(model: Any, client: Any, prompt: list[int]) -> None:
    cache = wrap(model, client)
    kv = cache.prefill(prompt).past_key_values
    body = client.get(cache.keys(prompt)[2])

    assert len(body) == cache.layout.object_bytes == 3 * 2 * 2 * BLOCK * 16 * 4
    stored = torch.frombuffer(bytearray(body), dtype=torch.float32).view(3, 2, 2, BLOCK, 16)
    for layer, part in enumerate(kv.layers):
        assert torch.equal(stored[layer, 0], part.keys[0, :, 32:48])
        assert torch.equal(stored[layer, 1], part.values[0, :, 32:48])


def test_prompts_that_share_a_beginning_share_its_objects(model: Any, client: Any, prompt: list[int]) -> None:
    cache = wrap(model, client)
    cache.prefill(prompt)
    other = [*prompt[:40], *reversed(prompt[40:])]

    assert through(cache, other) == plain(model, other)
    assert cache.last is not None
    assert cache.last.loaded == 32
    assert cache.last.stored == 64


def test_one_token_is_always_left_to_compute(model: Any, client: Any, prompt: list[int]) -> None:
    cache = wrap(model, client)
    whole = prompt[: 2 * BLOCK]
    cache.prefill(whole)
    again = cache.prefill(whole)

    assert cache.last is not None
    assert (cache.last.loaded, cache.last.computed) == (BLOCK, BLOCK)
    torch.testing.assert_close(again.logits, last_logits(model, whole), rtol=1e-4, atol=1e-5)


def test_a_prompt_of_one_token_goes_through(model: Any, client: Any) -> None:
    assert through(wrap(model, client), [5]) == plain(model, [5])


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it(
    model: Any, client: Any, prompt: list[int]
) -> None:
    cache = wrap(model, client)
    turn = through(cache, prompt, 30)
    following = [*turn, 1, 2, 3]

    assert through(cache, following) == plain(model, following)
    assert cache.last is not None
    assert cache.last.loaded == 128  # of 129 tokens that have KV cache; the prompt alone had 100


def test_an_object_evicted_between_look_up_and_view_only_shortens_the_prefix(
    model: Any, client: Any, prompt: list[int]
) -> None:
    wrap(model, client).prefill(prompt)
    cache = wrap(model, client)

    def look_up_then_lose(keys: list[bytes]) -> int:
        length = client.prefix_length(keys)
        client.remove_many([keys[3]])
        return int(length)

    losing: Any = Store(client, prefix_length=look_up_then_lose)
    cache.client = losing
    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last is not None
    assert cache.last.loaded == 3 * BLOCK
    assert cache.last.stored == BLOCK  # the lost one is back; those behind it were there all the time
    assert cache.failures == 0


def test_an_object_of_another_size_is_a_miss(model: Any, client: Any, prompt: list[int]) -> None:
    cache = wrap(model, client)
    client.put(cache.keys(prompt)[0], b"not a block")

    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last is not None
    assert cache.last.loaded == 0


def test_without_a_node_generation_goes_on_and_the_log_says_so_once(
    model: Any, client: Any, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: Any, **__: Any) -> Any:
        raise NodeUnavailable("no node here")

    cache = wrap(model, Store(client, prefix_length=unavailable, reserve_many=unavailable))
    with caplog.at_level(logging.WARNING, "moonpool"):
        for _ in range(3):
            assert through(cache, prompt) == plain(model, prompt)

    assert cache.failures == 3
    assert cache.last is not None
    assert "no node here" in cache.last.trouble
    assert [record.name for record in caplog.records] == ["moonpool.engines.transformers.cache"]


def test_a_node_that_dies_under_the_view_leaves_a_clean_cache(
    model: Any, client: Any, prompt: list[int]
) -> None:
    wrap(model, client).prefill(prompt)

    def unavailable(*_: Any, **__: Any) -> Any:
        raise NodeUnavailable("died")

    cache = wrap(model, Store(client, view_many=unavailable))
    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last is not None
    assert (cache.last.loaded, cache.failures) == (0, 1)


def test_a_full_store_is_counted_and_harmless(model: Any, client: Any, prompt: list[int]) -> None:
    class Refused:
        buffer, status = None, Status.NO_SPACE

    class Nothing(list[Any]):
        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    cache = wrap(model, Store(client, reserve_many=lambda keys, sizes: Nothing([Refused()] * len(keys))))
    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last is not None
    assert (cache.last.stored, cache.failures) == (0, 1)
    assert "NO_SPACE" in cache.last.trouble


def test_models_share_only_what_is_equal_in_all_that_matters(
    make_model: Any, client: Any, prompt: list[int]
) -> None:
    wrap(make_model(), client).prefill(prompt)

    def loaded(model: Any, **arguments: Any) -> int:
        cache = wrap(model, client, **arguments)
        assert through(cache, prompt) == plain(model, prompt)
        assert cache.last is not None
        return cache.last.loaded

    assert loaded(make_model()) == 96
    assert loaded(make_model(seed=1)) == 0
    assert loaded(make_model(dtype=torch.bfloat16)) == 0
    assert loaded(make_model(rope_parameters={"rope_type": "default", "rope_theta": 777.0})) == 0
    assert loaded(make_model(), tenant="another") == 0
    assert loaded(make_model(), tokens_per_object=8) == 0


def test_weights_changed_in_place_are_found_under_other_keys(
    make_model: Any, client: Any, prompt: list[int]
) -> None:
    model = make_model()
    cache = wrap(model, client)
    through(cache, prompt)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)

    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last is not None
    assert (cache.last.loaded, cache.last.stored) == (0, 96)


def test_an_adapter_counts_by_its_content_and_by_whether_it_is_active(make_model: Any, client: Any) -> None:
    def adapted(fill: float, active: str = "first") -> bytes:
        model = make_model()
        projection = model.model.layers[0].self_attn.q_proj
        projection.lora_A = torch.nn.ModuleDict({"first": torch.nn.Linear(64, 4096, bias=False)})
        with torch.no_grad():
            projection.lora_A["first"].weight.zero_()
            # Between the places that a sampled fingerprint would look at.
            projection.lora_A["first"].weight[100, 3] = fill
        model.peft_config = {"first": {"r": 4096}}
        model.active_adapters = lambda: [active]
        return wrap(model.eval(), client).space.digest

    digests = {adapted(0.0), adapted(1.0), adapted(0.0, "none"), wrap(make_model(), client).space.digest}
    assert len(digests) == 4
    assert adapted(1.0) == adapted(1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"return_dict_in_generate": True, "output_logits": True},
        {"do_sample": True, "num_beams": 2},
        {"prefill_chunk_size": 24},
        {"generation_config": transformers.GenerationConfig(num_beams=2)},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_what_generate_offers_works_through_the_cache(
    model: Any, client: Any, prompt: list[int], arguments: dict[str, Any]
) -> None:
    def rows(output: Any) -> list[list[int]]:
        return (output if isinstance(output, torch.Tensor) else output.sequences).tolist()

    settings = {"max_new_tokens": 8, "do_sample": False, **arguments}
    cache = wrap(model, client)
    for expected_load in (0, 96):
        torch.manual_seed(3)
        expected = model.generate(torch.tensor([prompt]), **settings)
        torch.manual_seed(3)
        assert rows(cache.generate(prompt, **settings)) == rows(expected)
        assert cache.last is not None
        assert (cache.last.loaded, cache.failures) == (expected_load, 0)


@pytest.mark.parametrize("control", ["other block", "shifted layer", "values swapped"])
def test_a_wrong_block_would_show(model: Any, client: Any, prompt: list[int], control: str) -> None:
    """What makes the comparisons above worth something: they fail when a loaded block isn't the right one."""
    cache = wrap(model, client)
    cache.prefill(prompt)
    cache.prefill(list(reversed(prompt)))
    keys, others = cache.keys(prompt), cache.keys(list(reversed(prompt)))

    def body(key: bytes) -> Any:
        return torch.frombuffer(bytearray(client.get(key)), dtype=torch.float32).view(cache.layout.shape)

    wrong = body(keys[2])
    if control == "other block":
        wrong = body(others[2])
    elif control == "shifted layer":
        wrong[1] = wrong[2].clone()
    else:
        wrong[:, 1] = body(keys[4])[:, 1]
    client.remove_many([keys[2]])
    client.put(keys[2], wrong.numpy())

    logits = cache.prefill(prompt).logits
    assert cache.last is not None
    assert cache.last.loaded == 96
    assert (logits - last_logits(model, prompt)).abs().max() > 1e-2


def test_whole_blocks_swapped_change_no_output(model: Any, client: Any, prompt: list[int]) -> None:
    """Keys carry their positions and attention sums over a set: only the cache itself shows such a swap."""
    cache = wrap(model, client)
    right = cache.prefill(prompt)
    keys = cache.keys(prompt)
    first, second = client.get(keys[1]), client.get(keys[4])
    client.remove_many([keys[1], keys[4]])
    client.put(keys[1], second)
    client.put(keys[4], first)
    swapped = cache.prefill(prompt)

    torch.testing.assert_close(swapped.logits, right.logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        swapped.past_key_values.layers[0].keys, right.past_key_values.layers[0].keys, atol=1e-2
    )


def test_what_was_loaded_is_the_callers_own(model: Any, client: Any, prompt: list[int]) -> None:
    cache = wrap(model, client)
    cache.prefill(prompt)
    loaded = cache.prefill(prompt).past_key_values
    for layer in loaded.layers:
        layer.keys.zero_()

    assert through(cache, prompt) == plain(model, prompt)


def test_switched_off_by_the_operator_everything_is_computed(
    model: Any, client: Any, prompt: list[int]
) -> None:
    cache = wrap(model, client)
    cache.prefill(prompt)
    client.set_mode("off")
    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last is not None
    assert (cache.last.loaded, cache.last.stored) == (0, 0)
    client.set_mode("on")
    assert through(cache, prompt) == plain(model, prompt)
    assert cache.last.loaded == 96


@pytest.mark.slow
def test_generation_survives_the_node_and_finds_the_next_one(model: Any, prompt: list[int]) -> None:
    """A real daemon, stopped under a client that goes on; the pool is gone with it."""
    expected = plain(model, prompt)
    with temporary_node(64 << 20) as url:
        client = moonpool.connect(url)
        cache = wrap(model, client)
        for loaded in (0, 96):
            assert through(cache, prompt) == expected
            assert cache.last is not None
            assert cache.last.loaded == loaded

    assert through(cache, prompt) == expected
    assert cache.last is not None
    assert cache.last.loaded == 0
    assert cache.last.trouble
    assert cache.failures == 1
    client.close()
    # Closed by its owner or lost with its node, a client is a miss all the same.
    assert through(cache, prompt) == expected


def test_no_pin_and_no_reservation_outlives_a_call(model: Any, client: Any, prompt: list[int]) -> None:
    cache = wrap(model, client)
    kept = [cache.prefill(prompt), cache.prefill(prompt)]
    stats = client.stats()
    assert (stats.pins, stats.holds, stats.reservations) == (0, 0, 0)
    assert kept[1].past_key_values.get_seq_length() == len(prompt)


def test_tokens_stay_right_while_the_pool_evicts(model: Any) -> None:
    with moonpool.connect("embedded:1MiB") as client:
        cache = wrap(model, client)
        draw = torch.Generator().manual_seed(11)
        prompts = [torch.randint(0, 97, (100,), generator=draw).tolist() for _ in range(20)]
        for prompt in [*prompts, *prompts[::-1]]:
            assert through(cache, prompt, 3) == plain(model, prompt, 3)
        assert client.stats().bytes_evicted > 0
        assert client.stats().hits > 0
        assert cache.failures == 0
