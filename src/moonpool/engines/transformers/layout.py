"""How the KV cache of a run of tokens lies in one object, and the copies in and out of it.

Layout 1: an array of shape `[layers, 2, kv_heads, tokens, head_dim]` in C order, keys at index 0 and values at
index 1 of the second axis, in the model's own KV dtype and the host's byte order, without a header. Keys are
stored as the model caches them, that is with their rotary positions applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

LAYOUT = "layers,kv,heads,tokens,head_dim"
LAYOUT_VERSION = 1

KeysAndValues = list[tuple[Any, Any]]
"""Per layer the keys and the values, torch tensors of shape `[rows, kv_heads, tokens, head_dim]`."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and dtype of one object: `tokens` tokens over all layers."""

    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    """`float32`, `float16` or `bfloat16`."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.layers, 2, self.kv_heads, self.tokens, self.head_dim

    @property
    def torch_dtype(self) -> Any:
        return getattr(torch, self.dtype)

    @property
    def object_bytes(self) -> int:
        """Size of one object in bytes."""
        return int(np.prod(self.shape)) * int(self.torch_dtype.itemsize)

    def tensor(self, buffer: npt.NDArray[np.uint8]) -> Any:
        """Return `buffer` (uint8, `object_bytes` long) as a tensor of `shape` over the same memory.

        The tensor keeps the array alive, and with it the pin. Never write to it where the array is read-only: torch
        has no read-only tensors, and the pool behind it is mapped read-only.
        """
        return torch.from_dlpack(buffer).view(self.torch_dtype).view(self.shape)

    def write(self, layers: KeysAndValues, start: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill `buffer` with the KV cache of tokens `start` to `start + tokens` of the first row, in one pass."""
        pieces = [part[0, :, start : start + self.tokens] for pair in layers for part in pair]
        target = self.tensor(buffer).view(2 * self.layers, *self.shape[2:])
        if target.device == pieces[0].device:
            torch.stack(pieces, out=target)
        else:
            target.copy_(torch.stack(pieces))

    def read(self, buffers: Sequence[npt.NDArray[np.uint8]], device: Any) -> KeysAndValues:
        """Return the KV cache of the objects in `buffers`, one after the other along the tokens, on `device`.

        The tensors are new and own their memory: one pass over the bytes on the CPU; on a GPU one transfer an
        object, then one pass on the GPU. Nothing returned refers to `buffers`.
        """
        columns = zip(
            *(self.tensor(b).view(2 * self.layers, *self.shape[2:]).to(device).unbind(0) for b in buffers),
            strict=True,
        )
        parts = [torch.cat(column, dim=1).unsqueeze(0) for column in columns]
        return list(zip(parts[0::2], parts[1::2], strict=True))

    def fits(self, layers: KeysAndValues) -> bool:
        """Whether a model's cache is one that `write` can take: layers, heads, head size and dtype as stated."""
        wanted = (self.kv_heads, self.head_dim)
        return len(layers) == self.layers and all(
            (part.shape[1], part.shape[3]) == wanted and part.dtype == self.torch_dtype
            for pair in layers
            for part in pair
        )
