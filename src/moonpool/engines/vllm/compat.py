"""All that differs between vLLM's versions, and all that is asked of its private parts. Nothing else imports these.

vLLM is imported within the functions, so that this module can be had, and tested, without.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moonpool.errors import MoonpoolError

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST_HIT: Any = CacheHitSource.HOST
    """What a hit in the pool is to vLLM's metrics, where it tells them apart (not yet in 0.26)."""
except ImportError:
    HOST_HIT = None

try:
    import vllm.distributed.kv_transfer.kv_connector.v1.base as _base

    KVConnectorMetadata: Any = _base.KVConnectorMetadata
    KVConnectorWorkerMetadata: Any = _base.KVConnectorWorkerMetadata
except ImportError:  # no vLLM here: what passes between scheduler and workers is plain data all the same
    KVConnectorMetadata = KVConnectorWorkerMetadata = object

log = logging.getLogger("moonpool.vllm")

TESTED = ((0, 26), (0, 32))
"""Versions, major and minor, whose tests have been run."""
OLDEST = (0, 26)
HASHES = ("sha256", "sha256_cbor")
"""Algorithms of block hashes that can't be made to collide. xxhash can: then a prompt made for the purpose would be
answered with another's KV."""
HASH_SEED = "0"
KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
INLINE_SCALES = ("fp8_per_token_head", "int8_per_token_head")
"""KV types whose scales lie in the blocks, beside the values."""


class Unsupported(MoonpoolError):
    """This engine can't use the pool, for a reason that fits in one line; it serves without."""


# ---- versions --------------------------------------------------------------------------------------------------------


def version() -> str:
    """The version of the vLLM that is installed."""
    import vllm

    return str(vllm.__version__)


def release(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as "0.32.0+cpu"; None where it names no release ("dev")."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def check(text: str) -> str | None:
    """Why vLLM of version `text` doesn't fit, in one line, or None where it does. Warns where it is untested."""
    number = release(text)
    if number is not None and number < OLDEST:
        return f"vLLM {text} is older than {'.'.join(map(str, OLDEST))}, the first version whose KV connectors fit"
    if number not in TESTED:
        tested = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
        log.warning("vLLM %s is untested with moonpool (tested: %s)", text, tested)
    return None


# ---- block hashes ----------------------------------------------------------------------------------------------------


def fix_hash_root(environ: MutableMapping[str, str] = os.environ) -> None:
    """See to it that every engine's chains of block hashes begin alike. Call it in the scheduler's process, when the
    connector is made: vLLM draws the root after that.

    In 0.26 the root is random unless PYTHONHASHSEED is set, so it is set here, for this process and those that it
    starts from now on. Newer versions have a fixed root, and nothing is done.
    """
    import vllm.v1.core.kv_cache_utils as hashing

    if hasattr(hashing, "DEFAULT_NONE_HASH_SEED"):
        if "PYTHONHASHSEED" in environ:
            log.info("PYTHONHASHSEED is set: only engines with the same one share KV cache")
    elif "PYTHONHASHSEED" not in environ:
        environ["PYTHONHASHSEED"] = HASH_SEED
        log.info("PYTHONHASHSEED=%s is set, so that this vLLM's block hashes are the same in every engine", HASH_SEED)


def recompute_on_failure(transfer_config: Any) -> None:
    """Have the engine compute what fails to load: its default is to fail the request, and a cache that has lost
    something is no reason for that. Call it when the scheduler's connector is made: the policy is read after that."""
    if transfer_config.kv_load_failure_policy != "recompute":
        transfer_config.kv_load_failure_policy = "recompute"
        log.info('kv_load_failure_policy is "recompute": what the pool no longer has is computed')


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """What a worker's `get_transfer_results` returns; asked for by those versions alone that have it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(set(), received, failed)


def failures_by_request() -> bool:
    """Whether the engine can be told which requests' loads have failed. Others (0.26) are told the blocks, which they
    understand where there is one KV group."""
    import vllm.distributed.kv_transfer.kv_connector.v1.base as base

    return hasattr(base, "KVConnectorTransferResults")


def register(name: str, module: str) -> None:
    """Make the connector known by its name alone: inside of a MultiConnector that is all that vLLM's front end has
    when it looks for the class that its stats belong to."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:  # it is known already
        pass


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one entry of `request.block_hashes` stands for."""
    if (known := getattr(kv_cache_config, "hash_block_size", None)) is not None:
        return int(known)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


# ---- what the engine is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is spread over workers. A worker's index is `pp_rank * tp_size + tp_rank`."""

    tp_size: int
    pp_size: int
    stages: tuple[tuple[int, int], ...]
    """Per pipeline stage its first layer, and the one behind its last."""
    layers: int
    kv_heads: int
    """Of the whole model."""

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(pipeline rank, tensor rank) of each worker, in the order of their indices."""
        return [(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]


def parallel(vllm_config: Any) -> Parallel:
    """How `vllm_config` spreads the model."""
    from vllm.distributed.utils import get_pp_indices

    model, config = vllm_config.model_config, vllm_config.parallel_config
    layers = int(model.get_total_num_hidden_layers())
    pp_size = int(config.pipeline_parallel_size)
    stages = tuple(tuple(map(int, get_pp_indices(layers, rank, pp_size))) for rank in range(pp_size))
    return Parallel(int(config.tensor_parallel_size), pp_size, stages, layers, int(model.get_total_num_kv_heads()))  # type: ignore[arg-type]


def own_rank() -> tuple[int, int]:
    """(pipeline rank, tensor rank) of this worker process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group)


def refusal(vllm_config: Any) -> str | None:
    """Why an engine so configured can't use the pool, in one line; None where it can."""
    cache, config = vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(getattr(cache, "prefix_caching_hash_algo", "sha256"))
    dtype = str(cache.cache_dtype)
    if algorithm not in HASHES:
        return f"prefix_caching_hash_algo {algorithm!r} can be made to collide: use one of {', '.join(HASHES)}"
    for size in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if int(getattr(config, size, 1) or 1) > 1:
            return f"{size} above 1 isn't supported: it spreads a block's tokens over ranks"
    if dtype not in KV_DTYPES + INLINE_SCALES:
        return f"KV cache of type {dtype!r} isn't supported: use one of {', '.join(KV_DTYPES + INLINE_SCALES)}"
    if getattr(cache, "calculate_kv_scales", False) and dtype.startswith("fp8"):
        return "calculate_kv_scales isn't supported: each engine's scales depend on its first request"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in ("extract_hidden_states", "custom_class"):
        return f"speculative method {speculative.method!r} isn't supported"
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        return "HiSparse isn't supported: its KV lies in pools of its own"
    return None


def attention_backend(vllm_config: Any, layer: str) -> str:
    """What a layer's kernels are, as far as the bytes of a block depend on it. In a worker, once the model is loaded.

    Raises `Unsupported` where that can't be told, or where the kernels keep their values elsewhere than their tensors
    say: those for CPUs take any type of KV cache that they are told, and write past the ends of blocks.
    """
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    if module is None:
        raise Unsupported(f"layer {layer} has KV cache but no attention layer of that name")
    backend = module.get_attn_backend()
    name, dtype = str(backend.get_name()), str(vllm_config.cache_config.cache_dtype)
    if not backend.supports_kv_cache_dtype(dtype):
        raise Unsupported(f"attention backend {name} doesn't support KV cache of type {dtype!r}")
    return f"{name} {_cpu_packing(vllm_config, module)}" if name == "CPU_ATTN" else name


def _cpu_packing(vllm_config: Any, module: Any) -> str:
    """On a CPU keys are packed for the instructions that it has (AMX, AVX, …), so other CPUs can't read them."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = vllm_config.cache_config
    return str(_get_attn_isa(vllm_config.model_config.dtype, cache.block_size, module.head_size, cache.cache_dtype))


# ---- KV groups -------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """What a token needs of the tokens before it."""

    FULL = "full"
    """All of them."""
    WINDOW = "window"
    """The last few; chunked local attention counts as this."""
    STATE = "state"
    """The one state behind the last of them (Mamba and its like)."""


_KINDS = {
    "full_attention": Kind.FULL,
    "mla_attention": Kind.FULL,
    "sliding_window": Kind.WINDOW,
    "sliding_window_mla": Kind.WINDOW,
    "chunked_local_attention": Kind.WINDOW,
    "mamba": Kind.STATE,
}
_UNSUPPORTED_SPECS = ("RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec", "CircularBufferSpec")
_DESCRIBING = (
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "cache_dtype_str",
    "compress_ratio",
    "tokens_per_state",
    "model_version",
    "tq_slot_size",
    "shapes",
    "dtypes",
    "mamba_type",
    "mamba_cache_mode",
    "tp_replicated",
)
"""What of a layer's spec says how its blocks are to be read. Windows aren't among it: they choose blocks."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part in a block of its KV group."""

    name: str
    block_bytes: int
    """Of this worker, without padding."""
    kv_heads: int | None
    """That this worker holds; None where that isn't what its state consists of, or every worker holds all of it."""
    replicated: bool
    """Whether every tensor-parallel rank holds the same."""
    text: str
    """What its bytes are, the same in every process."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    index: int
    kind: Kind
    block_tokens: int
    window_tokens: int
    """With kind WINDOW: how many tokens a token sees, itself included; else 0."""
    layers: tuple[Layer, ...]

    def blocks_per_object(self, tokens_per_object: int) -> int:
        """Blocks of this group that an object is made of; of a state there is one, behind the object's last token."""
        return 1 if self.kind is Kind.STATE else tokens_per_object // self.block_tokens


def kv_groups(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """The engine's KV groups. In a worker they name its own layers; in the scheduler those of pipeline rank 0, and of
    layers that differ in size within a group the scheduler knows only the first one's.

    Raises `Unsupported` where one can't be stored and loaded by blocks, or not by the hash of what came before.
    """
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    if not kv_cache_config.kv_cache_groups:
        raise Unsupported("the model has no KV cache")
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = _layer_specs(group)
        first = specs[0][1]
        kind = str(get_kv_cache_spec_kind(first).value)
        for _, spec in specs:
            _check_spec(kind, spec)
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise Unsupported(f"KV group {index} is kept outside of the engine's blocks")
        groups.append(
            KvGroup(
                index,
                _KINDS[kind],
                int(first.block_size),
                _window_tokens(first) if _KINDS[kind] is Kind.WINDOW else 0,
                tuple(_layer(name, kind, spec) for name, spec in specs),
            )
        )
    return tuple(groups)


def object_tokens(groups: tuple[KvGroup, ...], hash_block_tokens: int, wanted: int) -> int:
    """Tokens of an object: `wanted`, rounded up to whole blocks of every group and whole hashes."""
    unit = math.lcm(hash_block_tokens, *(group.block_tokens for group in groups))
    return -(-wanted // unit) * unit


def _layer_specs(group: Any) -> list[tuple[str, Any]]:
    spec = group.kv_cache_spec
    own = getattr(spec, "kv_cache_specs", None)
    if own is None:
        return [(str(name), spec) for name in group.layer_names]
    return [(str(name), own[name]) for name in group.layer_names if name in own]


def _check_spec(kind: str, spec: Any) -> None:
    name = type(spec).__name__
    if kind not in _KINDS or name in _UNSUPPORTED_SPECS:
        raise Unsupported(f"layers of kind {kind} ({name}) aren't supported")
    if getattr(spec, "non_causal", False):
        raise Unsupported("layers that look at later tokens aren't supported: their KV isn't decided by a prefix")
    if not getattr(spec, "prefix_cacheable", True):
        raise Unsupported(f"layers whose KV isn't decided by a prefix ({name}) aren't supported")
    if kind == "mamba" and str(spec.mamba_cache_mode) == "none":
        raise Unsupported("state-space layers need prefix caching (mamba_cache_mode): without it no state is kept")


def _window_tokens(spec: Any) -> int:
    if (chunk := getattr(spec, "attention_chunk_size", None)) is not None:
        return int(chunk)
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def _layer(name: str, kind: str, spec: Any) -> Layer:
    if kind == "mamba":
        size = sum(math.prod(shape) * _item_bytes(dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return Layer(name, size, None, bool(getattr(spec, "tp_replicated", False)), _text(kind, spec))
    replicated = kind.endswith("mla") or kind.startswith("mla") or getattr(spec, "max_tp_shards", None) == 1
    heads = None if replicated else int(spec.num_kv_heads)
    return Layer(name, int(spec.unpadded_page_size_bytes), heads, replicated, _text(kind, spec))


def _text(kind: str, spec: Any) -> str:
    found = [f"{name}={_plain(value)}" for name in _DESCRIBING if (value := getattr(spec, name, None)) is not None]
    return " ".join([kind, *found])


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(_plain, value)) + "]"
    if (name := getattr(value, "name", None)) is not None:  # an enumeration, whose numbers may change
        return str(name)
    return str(value).removeprefix("torch.")


def _item_bytes(dtype: Any) -> int:
    return int(dtype.itemsize)


# ---- what a step is --------------------------------------------------------------------------------------------------


class BlockTables:
    """The block tables of a step's requests, as its `SchedulerOutput` tells them."""

    def __init__(self, output: Any) -> None:
        self._new = {str(new.req_id): new for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        self._cached = {str(request_id): at for at, request_id in enumerate(cached.req_ids)}
        self._cached_data = cached
        state = getattr(output, "kv_connector_block_state", None)
        self._whole: Callable[[str], Any] | None = None if state is None else state.get_block_ids

    def changed(self) -> Iterator[str]:
        """Requests that are part of the step, and so may have other blocks than before it."""
        yield from self._new
        yield from self._cached

    def updated(self, request_id: str, before: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """The request's tables, per group, in this step; `before` is what they were the step before."""
        if self._whole is not None and (tables := self._whole(request_id)) is not None:
            return tuple(tables)
        if (new := self._new.get(request_id)) is not None:
            return tuple(list(table) for table in new.block_ids)
        at = self._cached[request_id]
        added = self._cached_data.new_block_ids[at]
        if request_id in self._cached_data.resumed_req_ids:
            return tuple(list(table) for table in added or ())
        if added is None:
            return before
        return tuple([*table, *more] for table, more in zip(before, added, strict=True))

    def computed(self, request_id: str) -> int:
        """Tokens of the request whose KV was there before this step."""
        if (new := self._new.get(request_id)) is not None:
            return int(new.num_computed_tokens)
        return int(self._cached_data.num_computed_tokens[self._cached[request_id]])
