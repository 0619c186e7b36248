from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moonpool.engines.vllm.compat import Kind, KvGroup, Layer, Unsupported  # noqa: E402
from moonpool.engines.vllm.layout import Geometry, geometry, layers_of, object_bytes  # noqa: E402
from moonpool.gpu.mover import Region  # noqa: E402

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 7, 4, 16, 32, 3
"""Of the caches below; a head of a token takes WIDTH elements, K and V together."""

Caches = dict[str, Any]


def group_of(
    caches: Mapping[str, Any],
    block_bytes: int,
    *,
    kind: Kind = Kind.FULL,
    heads: int | None = HEADS,
    text: str = "full",
) -> KvGroup:
    layers = tuple(Layer(name, block_bytes, heads, heads is None, text) for name in caches)
    return KvGroup(0, kind, TOKENS, 0, layers)


def found(caches: Caches, block_bytes: int, *, tokens: int = 2 * TOKENS, backend: str = "A", **how: Any) -> Geometry:
    return geometry([group_of(caches, block_bytes, **how)], caches, BLOCKS, tokens, lambda layer: backend)


def bytes_of(region: Region, blocks: tuple[int, ...]) -> bytes:
    """An object made of `blocks`, as the planes say it lies."""
    return b"".join(
        ctypes.string_at(plane.address + block * plane.stride_bytes, plane.piece_bytes)
        for plane in region.planes
        for block in blocks
    )


def put_bytes(region: Region, blocks: tuple[int, ...], content: bytes) -> None:
    at = 0
    for plane in region.planes:
        for block in blocks:
            ctypes.memmove(plane.address + block * plane.stride_bytes, content[at:], plane.piece_bytes)
            at += plane.piece_bytes


def dense(order: tuple[int, ...], shape: tuple[int, ...], dtype: Any = None) -> Any:
    """A tensor of `shape` whose dimensions lie in memory in `order`, the widest first."""
    memory = torch.zeros([shape[i] for i in order], dtype=dtype or torch.bfloat16)
    return memory.permute([order.index(i) for i in range(len(shape))])


def per_layer(make: Callable[[], Any]) -> Caches:
    return {f"model.layers.{i}.self_attn.attn": make() for i in range(LAYERS)}


def all_layers(order: tuple[int, ...]) -> Caches:
    """Views of one storage with the dimensions layer, block, head, token, element, in `order`."""
    whole = dense(order, (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH))
    return {f"model.layers.{i}.self_attn.attn": whole[i] for i in range(LAYERS)}


def halves() -> Any:
    return torch.zeros(2, BLOCKS, TOKENS, HEADS, WIDTH // 2, dtype=torch.bfloat16)


def padded() -> Any:
    page = HEADS * TOKENS * WIDTH
    return torch.zeros(BLOCKS, page + 128, dtype=torch.bfloat16)[:, :page].unflatten(1, (HEADS, TOKENS, WIDTH))


def kernel_blocks() -> Any:
    return torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, WIDTH, dtype=torch.bfloat16)


BHNC = (BLOCKS, HEADS, TOKENS, WIDTH)
CACHES: dict[str, Callable[[], Caches]] = {
    "heads before tokens": lambda: per_layer(lambda: dense((0, 1, 2, 3), BHNC)),
    "tokens before heads": lambda: per_layer(lambda: dense((0, 2, 1, 3), BHNC)),
    "heads before blocks": lambda: per_layer(lambda: dense((1, 0, 2, 3), BHNC)),
    "K and V apart": lambda: per_layer(halves),
    "K and V side by side": lambda: per_layer(
        lambda: torch.zeros(BLOCKS, 2, TOKENS, HEADS, WIDTH // 2, dtype=torch.bfloat16)
    ),
    "padded pages": lambda: per_layer(padded),
    "smaller blocks in the kernel": lambda: per_layer(kernel_blocks),
    "LBHNC": lambda: all_layers((0, 1, 2, 3, 4)),
    "LBNHC": lambda: all_layers((0, 1, 3, 2, 4)),
    "LHBNC": lambda: all_layers((0, 2, 1, 3, 4)),
    "BLHNC": lambda: all_layers((1, 0, 2, 3, 4)),
    "BLNHC": lambda: all_layers((1, 0, 3, 2, 4)),
    "BHLNC": lambda: all_layers((1, 2, 0, 3, 4)),
}
BLOCK_BYTES = HEADS * TOKENS * WIDTH * 2


def fill(caches: Caches, start: int) -> None:
    """Give every element of every layer a value of its own (up to what bfloat16 tells apart), other than `start`'s."""
    for number, tensor in enumerate(caches.values()):
        count = tensor.numel()
        values = torch.arange(count, dtype=torch.int32) * 7 + start + 31 * number
        tensor.copy_(values.to(torch.int16).view(tensor.dtype).reshape(tensor.shape))


def block_of(tensor: Any, block: int) -> Any:
    if tensor.shape[0] == 2:
        return tensor[:, block]
    ratio = tensor.shape[0] // BLOCKS
    return tensor[block * ratio : (block + 1) * ratio]


@pytest.mark.parametrize("kind", CACHES)
def test_an_object_is_all_of_its_blocks_and_nothing_else(kind: str) -> None:
    source, target, before = CACHES[kind](), CACHES[kind](), CACHES[kind]()
    fill(source, 1)
    fill(target, 1000)
    fill(before, 1000)
    content = bytes_of(found(source, BLOCK_BYTES).regions[0], (5, 2))
    put_bytes(found(target, BLOCK_BYTES).regions[0], (3, 6), content)

    for name, tensor in target.items():
        assert torch.equal(block_of(tensor, 3).view(torch.int16), block_of(source[name], 5).view(torch.int16))
        assert torch.equal(block_of(tensor, 6).view(torch.int16), block_of(source[name], 2).view(torch.int16))
        for block in (0, 1, 2, 4, 5):
            assert torch.equal(
                block_of(tensor, block).view(torch.int16), block_of(before[name], block).view(torch.int16)
            )


@pytest.mark.parametrize("kind", CACHES)
def test_the_workers_object_has_the_bytes_that_the_scheduler_reckons(kind: str) -> None:
    caches = CACHES[kind]()
    region = found(caches, BLOCK_BYTES).regions[0]
    assert region.object_bytes == object_bytes(group_of(caches, BLOCK_BYTES), 2 * TOKENS) == 2 * LAYERS * BLOCK_BYTES
    assert region.blocks_per_object == 2


@pytest.mark.parametrize(
    ("kind", "planes"),
    [
        ("heads before tokens", LAYERS),
        ("tokens before heads", LAYERS),
        ("heads before blocks", LAYERS * HEADS),
        ("K and V apart", LAYERS * 2),
        ("smaller blocks in the kernel", LAYERS),
        ("LBHNC", LAYERS),
        ("LHBNC", LAYERS * HEADS),
        ("BLHNC", 1),
        ("BHLNC", 1),
    ],
)
def test_what_lies_together_is_copied_together(kind: str, planes: int) -> None:
    assert len(found(CACHES[kind](), BLOCK_BYTES).regions[0].planes) == planes


def test_no_two_ways_to_lie_share_a_text() -> None:
    texts = {kind: found(make(), BLOCK_BYTES).groups[0].text for kind, make in CACHES.items()}
    # Whether a layer has a storage of its own, or pages have padding between them, isn't seen in an object.
    assert texts["LBHNC"] == texts["heads before tokens"] == texts["padded pages"]
    assert texts["LBNHC"] == texts["tokens before heads"]
    assert texts["LHBNC"] == texts["heads before blocks"]
    assert len(set(texts.values())) == len(texts) - 4


def test_the_text_is_the_same_wherever_the_cache_lies_and_however_many_blocks_it_has() -> None:
    few, many = per_layer(lambda: torch.zeros(7, 4, 16, 32)), per_layer(lambda: torch.zeros(90, 4, 16, 32))
    texts = [
        geometry([group_of(caches, 8192)], caches, blocks, 32, lambda layer: "A").groups[0].text
        for caches, blocks in ((few, 7), (many, 90))
    ]
    assert texts[0] == texts[1]


def test_other_bytes_in_a_block_are_another_text() -> None:
    caches = CACHES["LBHNC"]()
    text = found(caches, BLOCK_BYTES).groups[0].text
    as_half = {name: tensor.view(torch.float16) for name, tensor in caches.items()}
    renamed = {name.replace("model", "draft"): tensor for name, tensor in caches.items()}
    others = {
        found(caches, BLOCK_BYTES, backend="B").groups[0].text,
        found(caches, BLOCK_BYTES, text="full kv_quant_mode=FP8").groups[0].text,
        found(caches, BLOCK_BYTES, tokens=4 * TOKENS).groups[0].text,
        found(as_half, BLOCK_BYTES).groups[0].text,
        found(renamed, BLOCK_BYTES).groups[0].text,
        found(dict(reversed(caches.items())), BLOCK_BYTES).groups[0].text,
    }
    assert len(others | {text}) == 7


def test_layers_of_a_block_that_lie_together_are_named_in_their_order() -> None:
    """The same layers, the other way round in memory: the bytes of an object are others, so its text is."""
    caches = CACHES["BLHNC"]()
    names, views = list(caches), list(caches.values())
    turned = dict(zip(names, reversed(views), strict=True))
    assert found(caches, BLOCK_BYTES).groups[0].text != found(turned, BLOCK_BYTES).groups[0].text


def test_latent_attention_has_no_heads_to_share_out() -> None:
    caches = per_layer(lambda: torch.zeros(BLOCKS, TOKENS, 576, dtype=torch.bfloat16))
    layout = found(caches, TOKENS * 576 * 2, heads=None).groups[0]
    assert (layout.replicated, layout.kv_heads, len(layout.region.planes)) == (True, None, LAYERS)


def state_space() -> Caches:
    """A convolution's and a state-space model's state, beside each other in pages with room to spare."""
    caches: Caches = {}
    for i in range(LAYERS):
        raw = torch.zeros(BLOCKS * 4096, dtype=torch.int8)
        convolution = torch.as_strided(raw.view(torch.bfloat16), (BLOCKS, 3, 256), (2048, 256, 1), 0)
        state = torch.as_strided(raw.view(torch.float32), (BLOCKS, 2, 8, 16), (1024, 128, 16, 1), 384)
        caches[f"model.layers.{i}.mixer"] = [convolution, state]
    return caches


def test_a_state_is_one_block_of_all_its_tensors() -> None:
    caches = state_space()
    size = 3 * 256 * 2 + 2 * 8 * 16 * 4
    region = found(caches, size, kind=Kind.STATE, heads=None).regions[0]
    for number, (convolution, state) in enumerate(caches.values()):
        convolution[4] = number + 1
        state[4] = number + 10
    content = bytes_of(region, (4,))
    assert (region.blocks_per_object, len(region.planes), len(content)) == (1, LAYERS, LAYERS * size)
    put_bytes(region, (2,), content)
    for convolution, state in caches.values():
        assert torch.equal(convolution[2], convolution[4])
        assert torch.equal(state[2], state[4])
        assert not convolution[3].any()
        assert not state[3].any()


def test_layers_of_several_sizes_in_one_block_are_one_run() -> None:
    raw = torch.zeros(BLOCKS, 4096 + 8192, dtype=torch.uint8)
    caches = {"a": raw[:, :4096].unflatten(1, (16, 256)), "b": raw[:, 4096:].unflatten(1, (16, 512))}
    group = KvGroup(0, Kind.FULL, 16, 0, (Layer("a", 4096, 1, False, ""), Layer("b", 8192, 1, False, "")))
    plane = geometry([group], caches, BLOCKS, 16, lambda layer: "").regions[0].planes
    assert [(p.stride_bytes, p.piece_bytes) for p in plane] == [(12288, 12288)]


def test_a_layer_that_looks_at_anothers_cache_adds_nothing() -> None:
    caches = CACHES["LBHNC"]()
    group = group_of(caches, BLOCK_BYTES)
    shared = {**caches, "model.layers.9.self_attn.attn": caches["model.layers.1.self_attn.attn"]}
    with_shared = group_of(shared, BLOCK_BYTES)
    regions = [
        geometry([g], shared, BLOCKS, TOKENS, lambda layer: "").regions[0].object_bytes for g in (group, with_shared)
    ]
    assert regions[0] == regions[1] == LAYERS * BLOCK_BYTES


def test_one_tensor_of_all_layers_is_taken_apart_by_layer() -> None:
    whole = dense((1, 0, 3, 2, 4), (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH))
    caches = CACHES["BLNHC"]()
    groups = [group_of(caches, BLOCK_BYTES)]
    region = geometry(groups, layers_of(whole, groups), BLOCKS, TOKENS, lambda layer: "").regions[0]
    assert [plane.piece_bytes for plane in region.planes] == [LAYERS * BLOCK_BYTES]
    with pytest.raises(Unsupported, match="2 layers"):
        layers_of(whole[:2], groups)


def test_every_group_has_its_own_region() -> None:
    caches = CACHES["LBHNC"]()
    names = list(caches)
    groups = [
        KvGroup(0, Kind.FULL, TOKENS, 0, (Layer(names[0], BLOCK_BYTES, HEADS, False, ""),)),
        KvGroup(1, Kind.WINDOW, TOKENS, 64, tuple(Layer(n, BLOCK_BYTES, HEADS, False, "") for n in names[1:])),
    ]
    regions = geometry(groups, caches, BLOCKS, TOKENS, lambda layer: "").regions
    assert [region.object_bytes for region in regions] == [BLOCK_BYTES, 2 * BLOCK_BYTES]


def test_a_block_in_crumbs_is_refused() -> None:
    caches = per_layer(lambda: dense((1, 2, 0, 3), BHNC))
    with pytest.raises(Unsupported, match="runs of 64 bytes"):
        found(caches, BLOCK_BYTES)


def test_bytes_that_overlap_are_refused() -> None:
    twice = torch.zeros(BLOCKS, 1, TOKENS, WIDTH).expand(BLOCKS, HEADS, TOKENS, WIDTH)
    with pytest.raises(Unsupported, match="overlap"):
        found(per_layer(lambda: twice), HEADS * TOKENS * WIDTH * 4)
    slid = torch.as_strided(torch.zeros(1 << 16), (BLOCKS, TOKENS, WIDTH), (WIDTH, WIDTH, 1))
    with pytest.raises(Unsupported, match="blocks overlap"):
        found(per_layer(lambda: slid), TOKENS * WIDTH * 4)


def test_other_sizes_than_the_engines_own_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"4096 bytes, by the engine's figures 4097"):
        found(CACHES["LBHNC"](), BLOCK_BYTES + 1)


def test_what_is_no_cache_of_so_many_blocks_is_refused() -> None:
    with pytest.raises(Unsupported, match="doesn't consist of 7 blocks"):
        found(per_layer(lambda: torch.zeros(BLOCKS + 1, 4, 16, 32)), 8192)
    with pytest.raises(Unsupported, match="no KV cache registered"):
        geometry([group_of({"missing": None}, 1)], {}, BLOCKS, TOKENS, lambda layer: "")
    with pytest.raises(Unsupported, match="2 KV blocks"):
        geometry([], {}, 2, TOKENS, lambda layer: "")
    with pytest.raises(Unsupported, match="24 tokens aren't whole blocks of 16"):
        found(CACHES["LBHNC"](), BLOCK_BYTES, tokens=24)


@pytest.mark.parametrize("order", list(permutations(range(5)))[::7])
def test_any_order_of_dimensions_is_whole_or_refused(order: tuple[int, ...]) -> None:
    source, target = all_layers(order), all_layers(order)
    fill(source, 3)
    try:
        region, to = found(source, BLOCK_BYTES).regions[0], found(target, BLOCK_BYTES).regions[0]
    except Unsupported:
        return
    put_bytes(to, (1, 4), bytes_of(region, (1, 4)))
    for name, tensor in target.items():
        assert torch.equal(tensor[[1, 4]].view(torch.int16), source[name][[1, 4]].view(torch.int16))
        assert not tensor[[0, 2, 3, 5, 6]].any()


# ---- vLLM's own tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kernel_tokens"),
    [(name, 32) for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")] + [("LBHNC", 16), ("LBNHC", 16)],
)
def test_vllm_allocates_what_is_expected(name: str, kernel_tokens: int) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        compute_layout_strides,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from moonpool.engines.vllm.compat import kv_groups

    layout = KVCacheLayout[name]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    tensor = KVCacheTensor(LAYERS * BLOCKS * spec.page_size_bytes, layers, strides[0], strides[1])
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(layers, spec)])
    groups = kv_groups(config)

    def allocated() -> Caches:
        caches: Caches = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_tokens])
        return caches

    source, target = allocated(), allocated()
    fill(source, 5)
    regions = [geometry(groups, caches, BLOCKS, 64, lambda layer: "CPU_ATTN").regions[0] for caches in (source, target)]
    assert regions[0].object_bytes == object_bytes(groups[0], 64) == 2 * LAYERS * spec.page_size_bytes
    put_bytes(regions[1], (4, 1), bytes_of(regions[0], (2, 6)))
    for layer in layers:
        assert torch.equal(block_of(target[layer], 4).view(torch.int16), block_of(source[layer], 2).view(torch.int16))
        assert torch.equal(block_of(target[layer], 1).view(torch.int16), block_of(source[layer], 6).view(torch.int16))
        assert not block_of(target[layer], 3).any()


def test_vllms_groups_of_several_kinds_lie_over_each_other() -> None:
    """A hybrid model's groups share one storage: block 3 is one group's or the other's."""
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from moonpool.engines.vllm.compat import kv_groups

    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=100)
    page = full.page_size_bytes
    state = MambaSpec(
        block_size=32,
        shapes=((3, 128), (2, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
    )
    names = [["a.0", "a.2"], ["b.1", "b.3"], ["c.4", "c.5"]]
    config = KVCacheConfig(
        BLOCKS,
        [KVCacheTensor(2 * BLOCKS * page, layers, BLOCKS * page, page) for layers in names],
        [KVCacheGroupSpec(layers, spec) for layers, spec in zip(names, (full, window, state), strict=True)],
    )
    groups = kv_groups(config)
    assert [(g.kind, g.window_tokens) for g in groups] == [(Kind.FULL, 0), (Kind.WINDOW, 100), (Kind.STATE, 0)]
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC, [32, 32, 32])
    regions = geometry(groups, caches, BLOCKS, 64, lambda layer: "").regions
    assert [r.object_bytes for r in regions] == [object_bytes(g, 64) for g in groups]
    assert [r.blocks_per_object for r in regions] == [2, 2, 1]
    assert regions[0].planes == regions[1].planes
    assert regions[2].object_bytes == 2 * (3 * 128 * 2 + 2 * 16 * 16 * 4)
