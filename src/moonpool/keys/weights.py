"""Fingerprints of weights: what tells two checkpoints apart, whatever they are called.

Reading every byte of a model takes minutes, so tensors are sampled: small ones (norms, KV scales) whole,
large ones at places that depend only on their size. Training touches nearly every element of a tensor that it
touches at all. A fingerprint guards against mix-ups; it is no proof against someone who changes single
elements on purpose.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

SAMPLE_BYTES = 4096
"""Length of one sample: a page, the least that a disk reads."""

FILE_SAMPLES = 64
"""Samples of a file, evenly spaced, its head and its tail among them."""

TENSOR_SAMPLES = 16
"""Samples of a tensor in memory, evenly spaced, its head and its tail among them."""

# A header larger than this isn't one: the format's own readers refuse it too.
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000

_FILES_PREFIX = "files1"
_STATE_PREFIX = "state1"
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_DESCRIBING = (*_CONFIGS, "*.index.json", "*quant*.json", "*scales*.json")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


class HasStateDict(Protocol):
    """A module whose `state_dict()` maps names to tensors, such as `torch.nn.Module`."""

    def state_dict(self) -> Mapping[str, Any]: ...


def fingerprint_weights(folder: str | Path) -> str:
    """Return the fingerprint of the model, or the adapter, in `folder`: "files1:" and 64 hexadecimal digits.

    Covers, whole, the configuration, the index, quantisation and KV-scale files, and of each weight file its
    size, samples of it, and for safetensors its header and a sample of every tensor. The folder's name and
    times don't matter. Reads only. Raises FileNotFoundError when there is no such folder, configuration,
    weight file or indexed shard, and ValueError when a safetensors file is damaged.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder: give the folder that holds the model's config.json")
    describing = sorted({path for pattern in _DESCRIBING for path in root.glob(pattern) if path.is_file()})
    if not any(path.name in _CONFIGS for path in describing):
        raise FileNotFoundError(f"{root} holds none of {', '.join(_CONFIGS)}: it isn't a model's folder")
    state = hashlib.sha256()
    for path in describing:
        _add(state, path.name.encode(), path.read_bytes())
    for path in _weight_files(root):
        _add(state, path.name.encode(), path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in _file_samples(file, path):
                _add(state, sample)
    return f"{_FILES_PREFIX}:{state.hexdigest()}"


def fingerprint_state(state: Mapping[str, Any] | HasStateDict) -> str:
    """Return the fingerprint of weights in memory: "state1:" and 64 hexadecimal digits.

    `state` maps names to numpy arrays or torch tensors (on any device), or is a module that has a
    `state_dict()`. Names, types, shapes and the sampled values count, not their order or where they lie;
    equal arrays and tensors count the same. Only reads; copies the samples (64 KiB a tensor at most) to the
    host. It says nothing about files: the same model has another `fingerprint_weights`. Raises ValueError
    when there is nothing in it, and TypeError for values that have no plain bytes.
    """
    tensors = state if isinstance(state, Mapping) else state.state_dict()
    if not tensors:
        raise ValueError("there are no weights to take a fingerprint of")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        shape = ",".join(map(str, getattr(value, "shape", ())))
        _add(digest, name.encode(), kind.encode(), shape.encode(), _sampled_values(name, value))
    return f"{_STATE_PREFIX}:{digest.hexdigest()}"


def sample_offsets(length: int, width: int, count: int) -> list[int]:
    """Return where to sample `length` units, `width` at a time: `count` evenly spaced offsets, the first and
    last included.

    When all samples together would cover the whole, the offsets step through it from end to end instead.
    """
    if length <= width * count:
        return list(range(0, length, width))
    return [index * (length - width) // (count - 1) for index in range(count)]


def _add(state: Any, *parts: bytes) -> None:
    """Feed `parts` to the hash behind their lengths, so that no two sequences of parts read the same."""
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)


def _weight_files(root: Path) -> list[Path]:
    """Return the files that an engine would load: those the index names, else those of one known kind."""
    indexed: set[str] = set()
    for index in sorted(root.glob("*.index.json")):
        indexed.update(json.loads(index.read_bytes()).get("weight_map", {}).values())
    if indexed:
        files = [root / name for name in sorted(indexed)]
        if missing := [path.name for path in files if not path.is_file()]:
            raise FileNotFoundError(f"{root} lacks {', '.join(missing)}, which its index names: complete the download")
        return files
    for pattern in _WEIGHT_PATTERNS:
        if files := sorted(path for path in root.glob(pattern) if path.is_file()):
            return files
    raise FileNotFoundError(f"{root} holds no weights ({', '.join(_WEIGHT_PATTERNS)}): a name alone is no fingerprint")


def _file_samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    for offset in sample_offsets(size, SAMPLE_BYTES, FILE_SAMPLES):
        yield _read(file, offset, SAMPLE_BYTES)
    if path.suffix == ".safetensors":
        yield from _tensor_samples(file, path, size)


def _tensor_samples(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    """Yield a safetensors file's header, then the middle of each of its tensors: small tensors whole."""
    prefix = _read(file, 0, 8)
    header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if not 0 < header_bytes <= min(SAFETENSORS_HEADER_BYTES_MAX, size - 8):
        raise ValueError(f"{path} is not a safetensors file, or is cut short: download it again")
    header = _read(file, 8, header_bytes)
    yield header
    try:
        spans = [tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a safetensors header that can't be read ({error}): download it again") from None
    for first, end in sorted(spans):
        length = min(end - first, SAMPLE_BYTES)
        yield _read(file, 8 + header_bytes + first + (end - first - length) // 2, length)


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _sampled_values(name: str, value: Any) -> bytes:
    if type(value).__module__.partition(".")[0] == "torch":
        return _sampled_tensor(value)
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"{name} is of type {type(value).__name__}, which has no plain bytes: give arrays or tensors")
    flat = array.reshape(-1)
    width = _sample_elements(flat.dtype.itemsize)
    pieces = [flat[offset : offset + width] for offset in sample_offsets(flat.size, width, TENSOR_SAMPLES)]
    if not pieces:
        return b""
    sampled = np.concatenate(pieces)
    return sampled.astype(sampled.dtype.newbyteorder("<"), copy=False).tobytes()


def _sampled_tensor(tensor: Any) -> bytes:
    # Imported only when the caller has it already: torch is an optional dependency.
    import torch

    flat = tensor.detach().reshape(-1)
    width = _sample_elements(flat.element_size())
    pieces = [flat[offset : offset + width] for offset in sample_offsets(flat.numel(), width, TENSOR_SAMPLES)]
    if not pieces:
        return b""
    # Joined where they lie, so that a tensor on a GPU costs one copy; as bytes, because numpy has no
    # bfloat16.
    sampled: bytes = torch.cat(pieces).contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return sampled


def _sample_elements(element_bytes: int) -> int:
    return max(1, SAMPLE_BYTES // element_bytes)
