"""What a vLLM engine's KV cache depends on besides the tokens: its key space, its adapters', and those of its ranks.

The scheduler computes the key space. Workers, which alone know their tensors, say with their first report what their
objects consist of (`RankReport`), and the engine serves from the pool only when they have. A worker that computes
another key space than the scheduler's, because its files are others, makes the engine go without the pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.engines.vllm import compat
from moonpool.engines.vllm.compat import KvGroup, Parallel, Unsupported
from moonpool.engines.vllm.layout import LAYOUT, LAYOUT_VERSION, Geometry
from moonpool.keys import KeySpace, fingerprint_weights, heads_of_rank

_IRRELEVANT = ("transformers_version", "_name_or_path", "use_cache", "return_dict", "output_attentions")
"""Of a model's configuration: doesn't reach the KV cache."""
_FROM_FILES = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor")
"""Load formats that read a model's folder, so that a fingerprint of the folder is one of the weights."""
_NO_DRAFT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculative methods without KV cache of their own: what they guess decides no KV."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
ADAPTERS_MAX = 4096
"""Adapters of one engine that are told apart; requests with further ones go without the pool."""
_CONTENT_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")


class Unidentified(Unsupported):
    """What the engine computes with can't be told apart from other things of the same name."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a worker says of itself: it crosses processes, so plain data."""

    rank: tuple[int, int]
    """Pipeline rank, tensor rank."""
    space: bytes
    """What it has computed of the engine's key space, see `common_digest`."""
    texts: tuple[str, ...]
    """Per KV group what its objects' bytes are."""
    object_bytes: tuple[int, ...]
    kv_heads: tuple[int | None, ...]
    replicated: tuple[bool, ...]


# ---- the engine ------------------------------------------------------------------------------------------------------


def engine_space(vllm_config: Any, tokens_per_object: int, *, tenant: str = "", epoch: str = "") -> KeySpace:
    """Return the key space of an engine with `vllm_config`: the same in its scheduler and all its workers.

    `epoch` is "" as long as the weights are those of the model's files, else a text that no other engine has. Reads
    the model's files (samples; a moment). Raises `Unidentified` where what the KV depends on can't be told, in one
    line.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = _plain(model.dtype) if cache.cache_dtype == "auto" else str(cache.cache_dtype)
    method, draft = _speculative(vllm_config)
    release = compat.release(compat.version())
    extra: dict[str, Any] = {
        "vllm": ".".join(map(str, release)) if release else compat.version(),
        "dtype": _plain(model.dtype),
    }
    if options := _options(model):
        extra["options"] = options
    if skipped := getattr(cache, "kv_cache_dtype_skip_layers", None):
        extra["unquantised_layers"] = sorted(map(str, skipped))
    if method:
        extra["speculative_tokens"] = int(vllm_config.speculative_config.num_speculative_tokens)
    if getattr(model, "multimodal_config", None) is not None:
        extra["processor"] = _processor_digest(vllm_config)
    if epoch:
        extra["epoch"] = epoch
    return KeySpace(
        weights=weights(vllm_config, model),
        tokens_per_block=tokens_per_object,
        kv_dtype=dtype,
        layout=LAYOUT,
        layout_version=LAYOUT_VERSION,
        inline_scales=cache.cache_dtype in compat.INLINE_SCALES,
        quantization=str(model.quantization or ""),
        speculative=method,
        draft_weights=draft,
        tenant=tenant,
        model=model_name(vllm_config),
        engine="vllm",
        extra=extra,
    )


def weights(vllm_config: Any, model: Any) -> str:
    """Return the fingerprint of `model`'s weights (the target's or the draft's configuration) as `vllm_config` loads
    them. Raises `Unidentified`."""
    load = vllm_config.load_config
    form = str(getattr(load.load_format, "value", load.load_format))
    if form == "dummy":
        return _dummy_weights(vllm_config, model)
    if form not in _FROM_FILES:
        raise Unidentified(f"load_format {form!r} isn't supported: its weights aren't those of the model's folder")
    folder = model_folder(model, getattr(load, "download_dir", None))
    mistral = form == "mistral" or str(getattr(model, "config_format", "")) == "mistral"
    try:
        found = _consolidated_weights(folder) if mistral else fingerprint_weights(folder)
    except (OSError, ValueError) as error:
        raise Unidentified(f"the weights of {folder} can't be told apart from others: {error}") from None
    return found if form in ("auto", "hf", "safetensors", "mistral") else _hashed("files", f"{form} {found}")


def model_folder(model: Any, download_dir: str | None = None) -> Path:
    """Return the folder that holds a model's files. Looks for it on this machine only; raises `Unidentified`."""
    name = str(model.model)
    if (folder := Path(name)).is_dir():
        return folder
    if folder.exists() or "://" in name:
        raise Unidentified(f"model {name!r} isn't a folder, so that its weights can't be told apart from others")
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            name, revision=getattr(model, "revision", None), cache_dir=download_dir, local_files_only=True
        )
    except Exception as error:  # whatever that library raises, the weights aren't there to be looked at
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unidentified(f"the files of model {name!r} aren't on this machine: {reason}") from None
    return Path(found)


def model_name(vllm_config: Any) -> str:
    """Return what people call the model: its repository, or its folder. Not what it is served as, since engines that
    serve it under several names share its KV cache; dummy weights are named by what they imitate."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        architectures = getattr(model.hf_config, "architectures", None) or ["unknown"]
        return f"dummy {architectures[0]}"
    name = str(model.model).rstrip("/")
    if snapshot := re.search(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+$", name):
        return f"{snapshot[1]}/{snapshot[2]}"
    return Path(name).name if Path(name).is_dir() else name


def config_digest(config: Any) -> str:
    """Return the SHA-256, in hexadecimal digits, of a model's configuration as it is in this process."""
    try:
        fields = json.loads(config.to_json_string(use_diff=False))
    except (AttributeError, TypeError, ValueError):
        fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    kept = {str(name): value for name, value in fields.items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=_plain).encode()).hexdigest()


def _options(model: Any) -> dict[str, Any]:
    """What the user has changed of what the model's files say, and what else vLLM has that decides the KV."""
    options: dict[str, Any] = {}
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides):
        options["config"] = config_digest(model.hf_config)
    elif overrides:
        options["config"] = json.dumps(overrides, sort_keys=True, default=_plain)
    if getattr(model, "disable_sliding_window", False):
        options["disable_sliding_window"] = True
    if (kind := _plain(getattr(model, "model_impl", "auto"))) not in ("auto", "vllm"):
        options["model_impl"] = kind
    # Some models turn their positions or temperatures by how long a prompt may become.
    if re.search(r"longrope|'su'|llama4", str(getattr(model.hf_config, "to_dict", dict)()), re.IGNORECASE):
        options["max_model_len"] = int(model.max_model_len)
    return options


def _dummy_weights(vllm_config: Any, model: Any) -> str:
    """Dummy weights are drawn with a fixed seed, tensor by tensor, so they depend on each tensor's size and type (the
    configuration, quantisation, tensor parallelism) and on the device's generator."""
    from vllm.platforms import current_platform

    device = str(vllm_config.device_config.device_type)
    try:
        device += f" {current_platform.get_device_name()}"
    except Exception:  # a platform that has no name for its devices
        pass
    members = {
        "config": _config_file_digest(model),
        "architectures": list(getattr(model.hf_config, "architectures", None) or ()),
        "dtype": _plain(model.dtype),
        "quantization": str(model.quantization or ""),
        "tensor_parallel": int(vllm_config.parallel_config.tensor_parallel_size),
        "device": device,
    }
    return _hashed("dummy", json.dumps(members, sort_keys=True))


def _config_file_digest(model: Any) -> str:
    """Of the file, where there is one: models change the configuration that they are given as they are loaded."""
    try:
        folder = model_folder(model)
    except Unidentified:
        return config_digest(model.hf_config)
    files = [folder / name for name in ("config.json", "params.json") if (folder / name).is_file()]
    return (
        hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        if files
        else config_digest(model.hf_config)
    )


def _consolidated_weights(folder: Path) -> str:
    """Of the files that the "mistral" format reads, which often lie beside another format's."""
    files = [*folder.glob("consolidated*.safetensors"), *folder.glob("params.json"), *folder.glob("config.json")]
    with tempfile.TemporaryDirectory() as alone:
        for file in files:
            (Path(alone) / file.name).symlink_to(file.resolve())
        return fingerprint_weights(alone)


def _speculative(vllm_config: Any) -> tuple[str, str]:
    """The method whose KV lies in the objects too, and its weights' fingerprint; both "" where there is none."""
    config = vllm_config.speculative_config
    if config is None or config.method in _NO_DRAFT_KV:
        return "", ""
    draft = getattr(config, "draft_model_config", None)
    if draft is None:
        raise Unidentified(f"speculative method {config.method!r} has no model to be told apart by")
    return str(config.method), weights(vllm_config, draft)


def _processor_digest(vllm_config: Any) -> str:
    """How images become tokens' embeddings: vLLM's hash of an image is one of the image alone."""
    model = vllm_config.model_config
    state = hashlib.sha256(str(getattr(model.multimodal_config, "mm_processor_kwargs", None)).encode())
    try:
        folder = model_folder(model, getattr(vllm_config.load_config, "download_dir", None))
    except Unidentified:
        return state.hexdigest()
    for name in _PROCESSORS:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            state.update(f"{name} {len(content)} ".encode() + content)
    return state.hexdigest()


# ---- what its requests bring along -----------------------------------------------------------------------------------


def lora_dtype(vllm_config: Any) -> str:
    """What the engine computes its adapters in; "" without any."""
    config = vllm_config.lora_config
    return "" if config is None else _plain(config.lora_dtype)


@dataclass(slots=True)
class Adapters:
    """The LoRA adapters that requests of this engine use, by their content. For one thread."""

    lora_dtype: str = ""
    _known: dict[tuple[int, str], tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    def space(self, space: KeySpace, request: Any) -> KeySpace | None:
        """Return the key space of `request` within the engine's `space`; None where its adapter's content can't be
        had, or has changed since this engine may have loaded it: then its KV is neither stored nor loaded.

        Reads the adapter's files when it is new, and the times of its files each time.
        """
        lora = request.lora_request
        if lora is None:
            return space
        fingerprint = self.fingerprint(lora)
        if not fingerprint:
            return None
        extra = {**space.extra, "lora_dtype": self.lora_dtype} if self.lora_dtype else space.extra
        return dataclasses.replace(space, lora=fingerprint, extra=extra)

    def fingerprint(self, lora: Any) -> str:
        """Return the fingerprint of an adapter's content, "" where it isn't certain."""
        key = (int(lora.lora_int_id), str(lora.lora_path))
        if getattr(lora, "tensorizer_config_dict", None):
            return ""
        try:
            stamp = _stamp(Path(lora.lora_path))
            known = self._known.get(key)
            if known is None and len(self._known) >= ADAPTERS_MAX:
                return ""
            if known is None or (known[0] != stamp and getattr(lora, "load_inplace", False)):
                known = (stamp, fingerprint_weights(lora.lora_path))
                if _stamp(Path(lora.lora_path)) != stamp:
                    return ""
                self._known[key] = known
            elif known[0] != stamp:
                # The engine may hold the adapter as it was, or read it anew as it is: there is no telling.
                known = self._known[key] = ((), "")
        except (OSError, ValueError):
            return ""
        return known[1]


def image_ok(request: Any) -> bool:
    """Whether the images, clips and sounds of `request` are named by their content, full width, and not by whoever sent
    them: vLLM takes a client's own names for them without a look at the bytes."""
    for feature in getattr(request, "mm_features", None) or ():
        name = getattr(feature, "mm_hash", None) or str(feature.identifier).rpartition(":")[2]
        if not _CONTENT_HASH.fullmatch(str(name)):
            return False
    return True


def _stamp(folder: Path) -> tuple[Any, ...]:
    """What changes when a file of an adapter is written or replaced."""
    found = []
    for file in sorted(folder.iterdir()):
        if file.is_file():
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns))
    return tuple(found)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def rank_report(rank: tuple[int, int], space: KeySpace, geometry: Geometry) -> RankReport:
    """What a worker with this geometry says of itself."""
    groups = geometry.groups
    return RankReport(
        rank,
        common_digest(space),
        tuple(group.text for group in groups),
        tuple(group.region.object_bytes for group in groups),
        tuple(group.kv_heads for group in groups),
        tuple(group.replicated for group in groups),
    )


def common_digest(space: KeySpace) -> bytes:
    """Return the digest of what every process of an engine finds alike in its key space: not so what loading a model
    may change, nor the epoch, which the scheduler alone knows."""
    extra = {name: value for name, value in space.extra.items() if name not in ("options", "epoch")}
    return dataclasses.replace(space, extra=extra).digest


def disagreement(
    space: KeySpace, groups: tuple[KvGroup, ...], parallel: Parallel, reports: Mapping[tuple[int, int], RankReport]
) -> str | None:
    """Why an engine can't serve from the pool with these workers, in one line; None where it can."""
    common = common_digest(space)
    for rank in parallel.ranks:
        name = f"worker {rank[1]} of pipeline stage {rank[0]}"
        report = reports.get(rank)
        if report is None:
            return f"{name} hasn't said how its KV cache lies"
        if report.space != common:
            return f"{name} runs another model than the scheduler: its files, or its vLLM, are others"
        if len(report.texts) != len(groups):
            return f"{name} has {len(report.texts)} KV groups, the scheduler {len(groups)}"
    return None


def rank_spaces(
    space: KeySpace, parallel: Parallel, reports: Mapping[tuple[int, int], RankReport]
) -> list[list[KeySpace]]:
    """Return the key spaces of what each worker holds: by KV group, then by rank, in the order of `parallel.ranks`.

    Ranks that hold the same have the same space. Named by layers and heads, and by what the worker's objects consist
    of, so that neither two groups nor two attention backends share keys.
    """
    of_group: list[list[KeySpace]] = []
    for group in range(len(reports[parallel.ranks[0]].texts)):
        of_group.append([shard_space(space, parallel, reports[rank], group) for rank in parallel.ranks])
    return of_group


def shard_space(space: KeySpace, parallel: Parallel, report: RankReport, group: int) -> KeySpace:
    """Return the key space of what a worker holds of a KV group."""
    pp, tp = report.rank
    first, end = parallel.stages[pp]
    whole = dataclasses.replace(space, extra={**space.extra, "objects": report.texts[group]})
    return whole.shard(layers=(first, end, parallel.layers), heads=_heads(parallel, report, group, tp))


def _heads(parallel: Parallel, report: RankReport, group: int, tp: int) -> tuple[int, int, int] | None:
    """Which KV heads a rank holds; of a state, which has none, which of as many parts as there are ranks."""
    if report.replicated[group] or parallel.tp_size == 1:
        return None
    own = report.kv_heads[group]
    try:
        named = heads_of_rank(parallel.kv_heads, tp, parallel.tp_size)
    except ValueError:
        named = None
    if own is not None and named is not None and named[1] - named[0] == own:
        return named
    return tp, tp + 1, parallel.tp_size


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _hashed(scheme: str, text: str) -> str:
    return f"{scheme}:{hashlib.sha256(text.encode()).hexdigest()}"
