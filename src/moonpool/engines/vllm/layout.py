"""Where the bytes of a worker's KV cache lie: from the tensors that the engine registers to the planes of its groups.

vLLM's layouts differ by version, backend and model: K and V in one tensor or in two halves, heads before tokens or
behind them, a layer's blocks together or a block's layers together, states of state-space layers beside each other,
blocks that are several of the kernel's. A tensor's shape and strides tell them all, so nothing here asks for a name.
What the bytes of an object are is written down as a text: only workers that write the same may share objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

from moonpool.engines.vllm.compat import KvGroup, Layer, Unsupported
from moonpool.gpu.mover import Plane, Region

LAYOUT = "plane,block,bytes"
LAYOUT_VERSION = 1
PIECE_BYTES_MIN = 256
"""Smaller contiguous runs than this move at a fraction of the wire's speed, whatever copies them."""
BLOCKS_MIN = 3
"""With fewer a dimension of two could be the blocks, or K and V. No engine serves with them: one is the null block."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV group of a worker."""

    region: Region
    text: str
    """What the bytes of an object are and in which order: the same text, the same bytes."""
    kv_heads: int | None
    """That this worker holds, in every layer; None where heads aren't what the ranks share out."""
    replicated: bool
    """Whether all tensor-parallel ranks hold the same."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A worker's KV cache, group by group."""

    groups: tuple[GroupLayout, ...]

    @property
    def regions(self) -> tuple[Region, ...]:
        """What a mover copies, in the order of the groups."""
        return tuple(group.region for group in self.groups)


def geometry(
    groups: Sequence[KvGroup],
    kv_caches: Mapping[str, Any],
    num_blocks: int,
    tokens_per_object: int,
    backend: Callable[[str], str],
) -> Geometry:
    """Return where the blocks of `groups` lie in `kv_caches`: the layers' tensors, or lists of them, by name.

    `num_blocks` is the engine's count; `backend` says of a layer what else its bytes depend on. Reads shapes and
    addresses only; what it returns is good for as long as the tensors live. Raises `Unsupported` where a block has no
    contiguous runs worth copying, or other bytes than the engine's own figures say.
    """
    if num_blocks < BLOCKS_MIN:
        raise Unsupported(f"the engine has {num_blocks} KV blocks; it takes at least {BLOCKS_MIN}")
    return Geometry(tuple(_group_layout(group, kv_caches, num_blocks, tokens_per_object, backend) for group in groups))


def layers_of(cross_layers: Any, groups: Sequence[KvGroup]) -> dict[str, Any]:
    """Return each layer's part of a tensor that holds the blocks of all layers, its first dimension the layers."""
    if len(groups) != 1 or len(groups[0].layers) != cross_layers.shape[0]:
        raise Unsupported(f"one tensor of {cross_layers.shape[0]} layers doesn't fit the engine's KV groups")
    return {layer.name: cross_layers[at] for at, layer in enumerate(groups[0].layers)}


def object_bytes(group: KvGroup, tokens_per_object: int) -> int:
    """Bytes of one object of `group`, as the engine's figures say; the worker's region has the same."""
    return group.blocks_per_object(tokens_per_object) * sum(layer.block_bytes for layer in group.layers)


class _Piece(NamedTuple):
    """A contiguous run of a layer's block."""

    layer: int
    place: int
    """Which of the layer's runs it is, in the order of its tensors and their dimensions."""
    plane: Plane


class _Block(NamedTuple):
    """One block of a tensor: from where to where it is to the next, and what it is within, in bytes."""

    stride: int
    dimensions: tuple[tuple[int, int], ...]
    """Size and stride of each; the first one counts the kernel's blocks in a block of the engine's."""


def _group_layout(
    group: KvGroup,
    kv_caches: Mapping[str, Any],
    num_blocks: int,
    tokens_per_object: int,
    backend: Callable[[str], str],
) -> GroupLayout:
    if tokens_per_object % group.block_tokens:
        raise Unsupported(f"objects of {tokens_per_object} tokens aren't whole blocks of {group.block_tokens}")
    pieces: list[_Piece] = []
    texts: list[str] = []
    seen: set[int] = set()
    for at, layer in enumerate(group.layers):
        tensors = _tensors(layer, kv_caches)
        if tensors[0].data_ptr() in seen:  # a layer without KV of its own, which looks at another's
            continue
        seen.add(tensors[0].data_ptr())
        blocks = [_block(layer.name, tensor, num_blocks) for tensor in tensors]
        pieces += _pieces(at, layer, tensors, blocks)
        shapes = " + ".join(_block_text(tensor, block) for tensor, block in zip(tensors, blocks, strict=True))
        texts.append(f"{backend(layer.name)}: {shapes} ({layer.text})")
    merged = _merged(pieces)
    if any(plane.stride_bytes < plane.piece_bytes for _, plane in merged):
        raise Unsupported(f"KV group {group.index}: blocks overlap each other")
    region = Region(tuple(plane for _, plane in merged), group.blocks_per_object(tokens_per_object))
    heads = {layer.kv_heads for layer in group.layers}
    names = ",".join(layer.name for layer in group.layers)
    order = ";".join(f"{plane.piece_bytes}:{made_of}" for made_of, plane in merged)
    kinds = ", ".join(f"{len(list(same))} × {text}" for text, same in groupby(texts))
    blocks_text = f"{region.blocks_per_object} blocks of {len(merged)} planes"
    return GroupLayout(
        region,
        f"{blocks_text}, layers {_digest(names)}, order {_digest(order)}; {kinds}",
        heads.pop() if len(heads) == 1 else None,
        all(layer.replicated for layer in group.layers),
    )


def _tensors(layer: Layer, kv_caches: Mapping[str, Any]) -> list[Any]:
    cache = kv_caches.get(layer.name)
    if cache is None:
        raise Unsupported(f"layer {layer.name} has no KV cache registered")
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def _block(name: str, tensor: Any, num_blocks: int) -> _Block:
    """What a block of `tensor` is. Blocks come first, or behind a dimension of two: K and V. A kernel's blocks may be
    smaller than the engine's: then several of them in a row are one."""
    item = int(tensor.element_size())
    shape = tuple(map(int, tensor.shape))
    strides = tuple(int(stride) * item for stride in tensor.stride())
    at = 1 if len(shape) > 1 and shape[0] == 2 else 0
    if not shape or shape[at] % num_blocks:
        raise Unsupported(f"layer {name}: a KV cache of shape {list(shape)} doesn't consist of {num_blocks} blocks")
    ratio = shape[at] // num_blocks
    within = [(shape[i], strides[i]) for i in range(len(shape)) if i != at]
    return _Block(ratio * strides[at], ((ratio, strides[at]), *within))


def _pieces(at: int, layer: Layer, tensors: Sequence[Any], blocks: Sequence[_Block]) -> list[_Piece]:
    """The contiguous runs of a layer's block, in the order of its tensors and where they lie."""
    planes: list[Plane] = []
    for tensor, block in zip(tensors, blocks, strict=True):
        run, outer = _runs(layer.name, block, int(tensor.element_size()))
        for place in product(*(range(size) for size, _ in outer)):
            offset = sum(index * stride for index, (_, stride) in zip(place, outer, strict=True))
            planes.append(Plane(int(tensor.data_ptr()) + offset, block.stride, run))
    total = sum(plane.piece_bytes for plane in planes)
    if total != layer.block_bytes:
        raise Unsupported(f"layer {layer.name}: a block has {total} bytes, by the engine's figures {layer.block_bytes}")
    return [_Piece(at, place, plane) for place, plane in enumerate(planes)]


def _runs(name: str, block: _Block, item_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """How long the contiguous runs of a block are, and the dimensions that lead from run to run, the widest first."""
    run = extent = item_bytes
    outer: list[tuple[int, int]] = []
    # From the innermost dimension outwards: part of the run for as long as each steps over just what lies within it.
    for size, stride in sorted(block.dimensions, key=lambda dimension: dimension[1]):
        if size == 1:
            continue
        if stride < extent:
            raise Unsupported(f"layer {name}: a block's bytes overlap each other")
        if not outer and stride == run:
            run *= size
        else:
            outer.append((size, stride))
        extent += (size - 1) * stride
    if run < PIECE_BYTES_MIN:
        raise Unsupported(f"layer {name}: a block lies in runs of {run} bytes; at least {PIECE_BYTES_MIN} are needed")
    return run, outer[::-1]


def _merged(pieces: Sequence[_Piece]) -> list[tuple[str, Plane]]:
    """The pieces in the order in which objects have them, neighbours in memory as one, and what each is made of.

    Layers come in their own order where each has its blocks for itself. Where the layers of a block lie together they
    come as they lie, so that one copy takes them all.
    """
    ordered = list(pieces)
    if len({piece.plane.stride_bytes for piece in pieces}) == 1:
        first = min(piece.plane.address for piece in pieces)
        end = max(piece.plane.address + piece.plane.piece_bytes for piece in pieces)
        if end - first <= pieces[0].plane.stride_bytes:
            ordered.sort(key=lambda piece: piece.plane.address)
    merged: list[tuple[str, Plane]] = []
    for layer, place, plane in ordered:
        made_of = f"{layer}.{place}"
        if merged and _adjoins(merged[-1][1], plane):
            parts, before = merged.pop()
            made_of = f"{parts},{made_of}"
            plane = Plane(before.address, before.stride_bytes, before.piece_bytes + plane.piece_bytes)
        merged.append((made_of, plane))
    return merged


def _adjoins(before: Plane, plane: Plane) -> bool:
    return (
        before.stride_bytes == plane.stride_bytes
        and before.address + before.piece_bytes == plane.address
        and before.piece_bytes + plane.piece_bytes <= plane.stride_bytes
    )


def _block_text(tensor: Any, block: _Block) -> str:
    """A block's dimensions, and which of them are the wider ones; the same whatever lies between blocks and runs."""
    sizes = "×".join(str(size) for size, _ in block.dimensions)
    widest = sorted(range(len(block.dimensions)), key=lambda i: (-block.dimensions[i][1], i))
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}[{sizes}] by {','.join(map(str, widest))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
