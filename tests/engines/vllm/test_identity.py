from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.engines.vllm import compat, identity
from moonpool.engines.vllm.compat import Kind, KvGroup, Parallel
from moonpool.engines.vllm.identity import Adapters, RankReport, Unidentified, engine_space, image_ok, rank_spaces
from moonpool.keys import KeySpace

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}


class HfConfig:
    """As much of a Hugging Face configuration as is looked at."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.architectures = fields["architectures"]

    def to_dict(self) -> dict[str, Any]:
        return self.fields

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.fields)


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: "0.32.0+cpu")


def write_model(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    values = np.random.default_rng(seed).integers(0, 255, 4096, dtype=np.uint8).tobytes()
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    return folder


def model_of(folder: Path | str, **config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model=str(folder),
        revision=None,
        dtype="torch.bfloat16",
        quantization=None,
        hf_config=HfConfig(**{**CONFIG, **config}),
        hf_overrides={},
        disable_sliding_window=False,
        model_impl="auto",
        config_format="hf",
        max_model_len=2048,
        multimodal_config=None,
        served_model_name="chat",
    )


def engine_of(folder: Path | str, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=model_of(folder),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", kv_cache_dtype_skip_layers=[], block_size=16
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_the_same_model_is_the_same_in_every_process(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama")
    space = engine_space(engine_of(folder), 256)
    assert space == engine_space(engine_of(folder), 256)
    assert (space.engine, space.model, space.tokens_per_block, space.kv_dtype) == ("vllm", "llama", 256, "bfloat16")
    assert space.weights.startswith("files1:")


def test_a_copy_elsewhere_and_another_served_name_share(tmp_path: Path) -> None:
    here, there = write_model(tmp_path / "a" / "llama"), write_model(tmp_path / "b" / "llama")
    engine = engine_of(there)
    engine.model_config.served_model_name = "assistant"
    assert engine_space(engine_of(here), 256) == engine_space(engine, 256)


def test_the_same_name_with_other_weights_is_another(tmp_path: Path) -> None:
    here, there = write_model(tmp_path / "a" / "llama"), write_model(tmp_path / "b" / "llama", seed=1)
    spaces = [engine_space(engine_of(folder), 256) for folder in (here, there)]
    assert spaces[0].model == spaces[1].model
    assert spaces[0].digest != spaces[1].digest


def _cache(name: str, value: Any) -> Callable[[Any], None]:
    return lambda engine: setattr(engine.cache_config, name, value)


def _model(name: str, value: Any) -> Callable[[Any], None]:
    return lambda engine: setattr(engine.model_config, name, value)


def _draft(method: str, seed: int = 7) -> Callable[[Any], None]:
    def change(engine: Any) -> None:
        folder = write_model(Path(engine.model_config.model).parent / f"draft{seed}" / "eagle", seed=seed)
        engine.speculative_config = SimpleNamespace(
            method=method, num_speculative_tokens=3, draft_model_config=model_of(folder)
        )

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "dtype": _model("dtype", "torch.float16"),
    "quantisation": _model("quantization", "fp8"),
    "overridden configuration": _model("hf_overrides", {"rope_theta": 1e6}),
    "no sliding window": _model("disable_sliding_window", True),
    "another implementation": _model("model_impl", "transformers"),
    "fp8 KV": _cache("cache_dtype", "fp8"),
    "KV with scales": _cache("cache_dtype", "fp8_per_token_head"),
    "layers left unquantised": _cache("kv_cache_dtype_skip_layers", ["0"]),
    "a draft model": _draft("eagle"),
    "another draft method": _draft("eagle3"),
    "another draft model": _draft("eagle", seed=8),
}


def test_whatever_changes_the_bytes_changes_the_keys(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama")
    digests = {"as it is": engine_space(engine_of(folder), 256).digest}
    for name, change in CHANGES.items():
        engine = engine_of(folder)
        change(engine)
        digests[name] = engine_space(engine, 256).digest
    digests["tokens of an object"] = engine_space(engine_of(folder), 512).digest
    digests["tenant"] = engine_space(engine_of(folder), 256, tenant="a").digest
    digests["epoch"] = engine_space(engine_of(folder), 256, epoch="1f").digest
    assert len(set(digests.values())) == len(digests)


def test_another_vllm_computes_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "llama")
    here = engine_space(engine_of(folder), 256)
    monkeypatch.setattr(compat, "version", lambda: "0.26.0")
    assert engine_space(engine_of(folder), 256).digest != here.digest
    monkeypatch.setattr(compat, "version", lambda: "0.32.4")
    assert engine_space(engine_of(folder), 256) == here


def test_guesses_without_kv_of_their_own_change_nothing(tmp_path: Path) -> None:
    engine = engine_of(write_model(tmp_path / "llama"))
    without = engine_space(engine, 256)
    engine.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=4, draft_model_config=None)
    assert engine_space(engine, 256) == without


def test_models_that_turn_with_the_longest_prompt_are_told_apart_by_it(tmp_path: Path) -> None:
    engine = engine_of(write_model(tmp_path / "phi"))
    engine.model_config.hf_config = HfConfig(**CONFIG, rope_scaling={"type": "longrope"})
    short = engine_space(engine, 256)
    engine.model_config.max_model_len = 131072
    assert engine_space(engine, 256).digest != short.digest


def test_what_prepares_images_counts_for_models_that_take_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "vision")
    engine = engine_of(folder)
    engine.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs=None)
    spaces = [engine_space(engine, 256)]
    (folder / "preprocessor_config.json").write_text('{"size": 224}')
    spaces.append(engine_space(engine, 256))
    engine.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs={"max_pixels": 1000})
    spaces.append(engine_space(engine, 256))
    assert len({space.digest for space in spaces}) == 3


def test_weights_in_a_format_beside_another_are_the_ones_that_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mistral")
    shutil.copy(write_model(tmp_path / "other", seed=3) / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")
    first = engine_space(engine_of(folder, "mistral"), 256)
    shutil.copy(write_model(tmp_path / "other", seed=4) / "model.safetensors", folder / "consolidated.safetensors")
    assert engine_space(engine_of(folder, "mistral"), 256).weights != first.weights


@pytest.mark.parametrize("load_format", ["tensorizer", "runai_streamer", "sharded_state", "of-a-plugin"])
def test_weights_from_elsewhere_are_not_identified(tmp_path: Path, load_format: str) -> None:
    with pytest.raises(Unidentified, match=load_format):
        engine_space(engine_of(write_model(tmp_path / "llama"), load_format), 256)


def test_weights_that_are_not_here_are_not_identified(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (tmp_path / "empty", "s3://bucket/llama", "nobody/has-this-model"):
        with pytest.raises(Unidentified):
            engine_space(engine_of(name), 256)


def test_a_snapshot_has_its_repositorys_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0e9e39f")
    assert engine_space(engine_of(folder), 256).model == "meta-llama/Llama-3.1-8B"


# ---- dummy weights ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dummy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    import sys

    platforms: Any = SimpleNamespace(current_platform=SimpleNamespace(get_device_name=lambda: "H200"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))

    def make(folder: Path, **config: Any) -> Any:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        return engine_of(folder, "dummy")

    return make


def test_dummy_weights_are_shared_by_what_they_are_drawn_from(tmp_path: Path, dummy: Callable[..., Any]) -> None:
    here, there = dummy(tmp_path / "one"), dummy(tmp_path / "two")
    space = engine_space(here, 256)
    assert space.weights.startswith("dummy:")
    assert space == engine_space(there, 256)
    others = [dummy(tmp_path / "three", hidden_size=128), dummy(tmp_path / "four"), dummy(tmp_path / "five")]
    others[1].parallel_config.tensor_parallel_size = 2
    others[2].device_config.device_type = "cuda"
    assert len({space.weights, *(engine_space(other, 256).weights for other in others)}) == 4


def test_dummy_weights_are_never_taken_for_real_ones(tmp_path: Path, dummy: Callable[..., Any]) -> None:
    engine = dummy(tmp_path / "llama")
    write_model(tmp_path / "llama")
    spaces = [engine_space(engine, 256), engine_space(engine_of(tmp_path / "llama"), 256)]
    assert spaces[0].weights != spaces[1].weights


# ---- adapters and images ---------------------------------------------------------------------------------------------


def write_adapter(folder: Path, seed: int = 0) -> Path:
    write_model(folder, seed=seed)
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    return folder


def request_of(folder: Path | None = None, number: int = 1, **lora: Any) -> Any:
    adapter = None
    if folder is not None:
        adapter = SimpleNamespace(lora_name="style", lora_int_id=number, lora_path=str(folder), **lora)
    return SimpleNamespace(lora_request=adapter, mm_features=[])


BASE = KeySpace(weights="files1:" + "0" * 64, tokens_per_block=256, kv_dtype="bfloat16", layout="plane,block,bytes")


def test_an_adapter_is_its_content_whatever_it_is_called_and_wherever_it_lies(tmp_path: Path) -> None:
    one, same, other = (write_adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    spaces = [Adapters().space(BASE, request_of(folder)) for folder in (one, same, other)]
    assert spaces[0] is not None
    assert spaces[0] == spaces[1]
    assert spaces[2] is not None
    assert len({BASE.digest, spaces[0].digest, spaces[2].digest}) == 3
    assert Adapters().space(BASE, request_of()) is BASE


def test_an_adapter_in_another_type_is_another(tmp_path: Path) -> None:
    request = request_of(write_adapter(tmp_path / "a"))
    assert Adapters("float16").space(BASE, request) != Adapters().space(BASE, request)


def test_an_adapter_that_cannot_be_read_has_no_space(tmp_path: Path) -> None:
    adapters = Adapters()
    assert adapters.space(BASE, request_of(tmp_path / "missing")) is None
    (tmp_path / "empty").mkdir()
    assert adapters.space(BASE, request_of(tmp_path / "empty")) is None
    tensorized = request_of(write_adapter(tmp_path / "a"), tensorizer_config_dict={"uri": "s3://…"})
    assert adapters.space(BASE, tensorized) is None


def test_an_adapter_that_changes_under_the_engine_is_let_alone(tmp_path: Path) -> None:
    """The engine may go on with what it has loaded, or load the files anew: its KV could be of either."""
    folder, adapters = write_adapter(tmp_path / "a", 1), Adapters()
    before = adapters.space(BASE, request_of(folder))
    write_adapter(folder, 2)
    assert adapters.space(BASE, request_of(folder)) is None
    assert adapters.space(BASE, request_of(folder)) is None
    reloaded = adapters.space(BASE, request_of(folder, number=2))
    assert reloaded is not None
    assert reloaded != before


def test_an_adapter_that_is_loaded_anew_on_request_is_looked_at_anew(tmp_path: Path) -> None:
    folder, adapters = write_adapter(tmp_path / "a", 1), Adapters()
    before = adapters.space(BASE, request_of(folder))
    write_adapter(folder, 2)
    after = adapters.space(BASE, request_of(folder, load_inplace=True))
    assert after is not None
    assert after != before
    assert adapters.space(BASE, request_of(folder)) == after


def test_a_known_adapter_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, adapters = write_adapter(tmp_path / "a"), Adapters()
    first = adapters.space(BASE, request_of(folder))
    monkeypatch.setattr(identity, "fingerprint_weights", lambda path: pytest.fail(f"{path} is read again"))
    assert adapters.space(BASE, request_of(folder)) == first


def test_so_many_adapters_are_told_apart_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "ADAPTERS_MAX", 1)
    adapters, folder = Adapters(), write_adapter(tmp_path / "a")
    assert adapters.space(BASE, request_of(folder)) is not None
    assert adapters.space(BASE, request_of(folder, number=2)) is None
    assert adapters.space(BASE, request_of(folder)) is not None


def images(*names: str, hashes: bool = True) -> Any:
    features = [SimpleNamespace(identifier=name, mm_hash=name.rpartition(":")[2] if hashes else None) for name in names]
    return SimpleNamespace(lora_request=None, mm_features=features)


def test_images_count_when_they_are_named_by_their_content() -> None:
    blake3, sha512 = "0af1" * 16, "0af1" * 32
    assert image_ok(images())
    assert image_ok(images(blake3, sha512))
    assert image_ok(images(f"style:{blake3}"))
    assert image_ok(images(f"style:{blake3}", hashes=False))
    assert image_ok(SimpleNamespace(mm_features=None))


@pytest.mark.parametrize("name", ["picture-1", "0af1", "0AF1" * 16, "550e8400-e29b-41d4-a716-446655440000"])
def test_images_named_by_whoever_sent_them_do_not(name: str) -> None:
    assert not image_ok(images("0af1" * 16, name))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def parallel_of(tp: int = 1, pp: int = 1, kv_heads: int = 8, layers: int = 8) -> Parallel:
    stages = tuple((layers * i // pp, layers * (i + 1) // pp) for i in range(pp))
    return Parallel(tp, pp, stages, layers, kv_heads)


def reports_of(
    parallel: Parallel, texts: tuple[str, ...] = ("full",), *, heads: int | None = None, replicated: bool = False
) -> dict[tuple[int, int], RankReport]:
    held = heads if heads is not None else max(1, parallel.kv_heads // parallel.tp_size)
    n = len(texts)
    return {
        rank: RankReport(
            rank,
            identity.common_digest(BASE),
            texts,
            (4096,) * n,
            (None if replicated else held,) * n,
            (replicated,) * n,
        )
        for rank in parallel.ranks
    }


def spaces_of(parallel: Parallel, **how: Any) -> list[list[KeySpace]]:
    return rank_spaces(BASE, parallel, reports_of(parallel, **how))


def test_one_worker_holds_the_whole_model() -> None:
    ((space,),) = spaces_of(parallel_of())
    assert (space.layers, space.heads) == (None, None)


def test_ranks_are_named_by_the_heads_and_layers_that_they_hold() -> None:
    (spaces,) = spaces_of(parallel_of(tp=2, pp=2))
    assert [(space.layers, space.heads) for space in spaces] == [
        ((0, 4, 8), (0, 4, 8)),
        ((0, 4, 8), (4, 8, 8)),
        ((4, 8, 8), (0, 4, 8)),
        ((4, 8, 8), (4, 8, 8)),
    ]


def test_ranks_that_hold_the_same_head_share() -> None:
    (spaces,) = spaces_of(parallel_of(tp=4, kv_heads=2))
    assert [space.heads for space in spaces] == [(0, 1, 2), (0, 1, 2), (1, 2, 2), (1, 2, 2)]
    assert spaces[0] == spaces[1]


def test_latent_attention_is_one_shard() -> None:
    (spaces,) = spaces_of(parallel_of(tp=4, kv_heads=1), replicated=True)
    assert len({space.digest for space in spaces}) == 1


def test_layers_with_other_heads_than_the_models_are_shared_with_nobody() -> None:
    (spaces,) = spaces_of(parallel_of(tp=2, kv_heads=8), heads=3)
    assert [space.heads for space in spaces] == [(0, 1, 2), (1, 2, 2)]


def test_neither_groups_nor_backends_share_keys() -> None:
    (one,), (two,) = spaces_of(parallel_of(), texts=("FLASH_ATTN full", "FLASH_ATTN window"))
    ((other,),) = spaces_of(parallel_of(), texts=("FLASHINFER full",))
    assert len({one.digest, two.digest, other.digest, BASE.digest}) == 4


def groups_of(count: int) -> tuple[KvGroup, ...]:
    return tuple(KvGroup(i, Kind.FULL, 16, 0, ()) for i in range(count))


def test_workers_have_to_agree() -> None:
    parallel = parallel_of(tp=2)
    reports = reports_of(parallel)
    assert identity.disagreement(BASE, groups_of(1), parallel, reports) is None
    assert "hasn't said" in str(identity.disagreement(BASE, groups_of(1), parallel, {(0, 0): reports[0, 0]}))
    assert "KV groups" in str(identity.disagreement(BASE, groups_of(2), parallel, reports))


def test_a_worker_with_other_files_is_found_out(tmp_path: Path) -> None:
    parallel = parallel_of(tp=2)
    here = engine_space(engine_of(write_model(tmp_path / "a" / "llama")), 256)
    there = engine_space(engine_of(write_model(tmp_path / "b" / "llama", seed=1)), 256)
    reports = {
        rank: RankReport(rank, identity.common_digest(space), ("full",), (1,), (4,), (False,))
        for rank, space in (((0, 0), here), ((0, 1), there))
    }
    assert "worker 1 of pipeline stage 0 runs another model" in str(
        identity.disagreement(here, groups_of(1), parallel, reports)
    )


def test_what_loading_changes_is_no_disagreement(tmp_path: Path) -> None:
    engine = engine_of(write_model(tmp_path / "phi"))
    engine.model_config.hf_config = HfConfig(**CONFIG, rope_scaling={"type": "longrope"})
    before = engine_space(engine, 256)
    engine.model_config.max_model_len = 1024
    after = engine_space(engine, 256, epoch="1f")
    assert before != after
    assert identity.common_digest(before) == identity.common_digest(after)


# ---- vLLM's own ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("vllm")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("llama")
    config = {**CONFIG, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config |= {"vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="float32", block_size=32)
    return args.create_engine_config()


def test_vllms_configuration_has_a_key_space(vllm_config: Any) -> None:
    space = engine_space(vllm_config, 256)
    assert space == engine_space(vllm_config, 256)
    assert (space.kv_dtype, space.model) == ("float32", "dummy LlamaForCausalLM")
    assert compat.refusal(vllm_config) is None
    assert compat.parallel(vllm_config) == Parallel(1, 1, ((0, 4),), 4, 2)
