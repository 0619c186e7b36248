"""Two checkpoints of one name are told apart by their bytes; one checkpoint is the same under any name."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.keys import KeySpace, fingerprint_state, fingerprint_weights
from moonpool.keys.weights import sample_offsets

torch = pytest.importorskip("torch")

TENSORS = {"embed": 300_000, "layer.q_proj": 200_000, "layer.k_proj": 90_001, "layer.k_scale": 4, "norm": 64}


def write_safetensors(path: Path, lengths: dict[str, int], seed: int = 0) -> None:
    header, offset = {}, 0
    for name, length in lengths.items():
        header[name] = {"dtype": "U8", "shape": [length], "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    data = np.random.default_rng(seed).integers(0, 256, offset, dtype=np.uint8).tobytes()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for seed, name in enumerate(names):
        write_safetensors(folder / name, TENSORS, seed)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    return folder


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset, 0 if offset >= 0 else 2)
        file.write(data)


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_fingerprint_is_deterministic_and_fits_a_key_space(model: Path) -> None:
    print_ = fingerprint_weights(model)
    assert print_ == fingerprint_weights(str(model))
    assert KeySpace(weights=print_, tokens_per_block=16, kv_dtype="bfloat16", layout="l").weights == print_


def test_a_copy_under_another_name_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(model, copy)
    (copy / "README.md").write_text("not weights")
    (copy / "pytorch_model.bin").write_bytes(
        b"the same weights in another form, which no engine loads beside safetensors"
    )
    assert fingerprint_weights(copy) == fingerprint_weights(model)


def second_shard(model: Path) -> Path:
    return model / "model-00002-of-00002.safetensors"


def retrain_one_small_projection(model: Path) -> None:
    """One tensor of 90 kB in the middle of a shard, as an adapter merged into k_proj alone would do."""
    shard = second_shard(model)
    overwrite(shard, data_start(shard) + 500_000, np.random.default_rng(9).bytes(90_001))


def change_one_kv_scale(model: Path) -> None:
    shard = second_shard(model)
    overwrite(shard, data_start(shard) + 590_002, b"\x01\x02")


CHANGES: list[Callable[[Path], Any]] = [
    retrain_one_small_projection,
    change_one_kv_scale,
    lambda model: overwrite(second_shard(model), -1, b"\xaa\xbb"),
    lambda model: (model / "config.json").write_text('{"model_type": "llama", "rope_theta": 1000000}'),
    lambda model: (model / "quantize_config.json").write_text('{"bits": 4}'),
    lambda model: (model / "hf_quant_config.json").write_text('{"kv_cache_quant_algo": "FP8"}'),
    lambda model: (model / "kv_cache_scales.json").write_text('{"0": 0.5}'),
    lambda model: write_safetensors(second_shard(model), {**TENSORS, "norm": 65}, 1),
    lambda model: write_safetensors(second_shard(model), {f"{name}_": size for name, size in TENSORS.items()}, 1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_other_bytes_under_the_same_name_are_another_model(model: Path, change: Callable[[Path], Any]) -> None:
    before = fingerprint_weights(model)
    change(model)
    assert fingerprint_weights(model) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.00.pth"])
def test_other_formats_are_sampled_over_their_length(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    data = bytearray(np.random.default_rng(1).bytes(1_000_000))
    (tmp_path / name).write_bytes(data)
    before = fingerprint_weights(tmp_path)
    data[400_000:420_000] = bytes(20_000)
    (tmp_path / name).write_bytes(data)
    assert fingerprint_weights(tmp_path) != before


def test_an_adapter_has_a_fingerprint_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    write_safetensors(tmp_path / "adapter_model.safetensors", {"lora_A": 8192})
    before = fingerprint_weights(tmp_path)
    write_safetensors(tmp_path / "adapter_model.safetensors", {"lora_A": 8192}, seed=5)
    assert fingerprint_weights(tmp_path) != before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder"):
        fingerprint_weights(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        fingerprint_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="a name alone is no fingerprint"):
        fingerprint_weights(tmp_path)


def test_a_missing_shard_is_named(model: Path) -> None:
    second_shard(model).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        fingerprint_weights(model)


@pytest.mark.parametrize(
    "data", [b"", b"\x05", b"\xff" * 40, b"\x02" + bytes(7) + b"no json", b"\x02" + bytes(7) + b"[]"]
)
def test_a_damaged_safetensors_file_is_named(model: Path, data: bytes) -> None:
    second_shard(model).write_bytes(data)
    with pytest.raises(ValueError, match=r"model-00002-of-00002.*download it again"):
        fingerprint_weights(model)


@pytest.mark.parametrize(
    ("length", "width", "count"), [(0, 4, 8), (5, 4, 8), (32, 4, 8), (33, 4, 8), (10**12, 4096, 64)]
)
def test_samples_reach_from_head_to_tail_and_stay_inside(length: int, width: int, count: int) -> None:
    offsets = sample_offsets(length, width, count)
    covered = {i for offset in offsets for i in (offset, min(offset + width, length) - 1)}
    assert len(offsets) == min(count, -(-length // width))
    assert not length or (min(covered) == 0 and max(covered) == length - 1)
    if length <= width * count:
        assert {i for offset in offsets for i in range(offset, min(offset + width, length))} == set(range(length))


def weights(seed: int = 0) -> dict[str, Any]:
    random_source = np.random.default_rng(seed)
    big = random_source.standard_normal((300, 400)).astype(np.float32)
    return {"big": big, "scale": np.array([0.5, 2.0], np.float32)}


def test_arrays_and_tensors_of_one_content_count_the_same() -> None:
    arrays = weights()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert fingerprint_state(arrays) == fingerprint_state(tensors)
    assert fingerprint_state(dict(reversed(arrays.items()))) == fingerprint_state(arrays)
    assert fingerprint_state({**arrays, "big": np.asfortranarray(arrays["big"])}) == fingerprint_state(arrays)


def test_a_module_counts_as_its_state() -> None:
    module = torch.nn.Linear(40, 30).to(torch.bfloat16)
    before = fingerprint_state(module)
    assert before == fingerprint_state(module.state_dict())
    with torch.no_grad():
        module.bias[3] += 1
    assert fingerprint_state(module) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "scale": np.array([0.5, 2.5], np.float32)},
        lambda state: {**state, "big": -state["big"]},
        lambda state: {**state, "big": state["big"].T},
        lambda state: {**state, "big": state["big"].view(np.int32)},
        lambda state: {**state, "more": np.zeros(1)},
        lambda state: {("huge" if name == "big" else name): value for name, value in state.items()},
    ],
)
def test_any_difference_in_the_state_shows(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert fingerprint_state(change(weights())) != fingerprint_state(weights())


def test_one_element_of_a_small_tensor_shows() -> None:
    changed = torch.zeros(16_000)
    before = fingerprint_state({"k": changed.clone()})
    changed[9_999] = 1
    assert fingerprint_state({"k": changed}) != before


def test_state_without_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="has no plain bytes"):
        fingerprint_state({"a": object()})
    with pytest.raises(ValueError, match="no weights"):
        fingerprint_state({})
    assert fingerprint_state({"empty": np.zeros(0)}) != fingerprint_state({"empty": torch.zeros(0)})
