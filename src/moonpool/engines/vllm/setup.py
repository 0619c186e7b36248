"""Puts the connector's two sides together from vLLM's configuration. Raises what says in one line why it can't."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from moonpool.client.attachment import Attachment
from moonpool.engines.vllm import compat, identity
from moonpool.engines.vllm.compat import Kind, KvGroup, Unsupported
from moonpool.engines.vllm.events import event_format
from moonpool.engines.vllm.layout import geometry
from moonpool.engines.vllm.metadata import WorkerReport
from moonpool.engines.vllm.plan import GroupPlan, Plan, window_objects
from moonpool.engines.vllm.pool import Pool
from moonpool.engines.vllm.scheduler import Scheduler
from moonpool.engines.vllm.settings import Settings, parse_settings
from moonpool.engines.vllm.shadow import Comparer, kinds, unsupported
from moonpool.engines.vllm.spaces import RankSpaces, Spaces
from moonpool.engines.vllm.worker import Worker
from moonpool.gpu.mover import Mover, Region

log = logging.getLogger("moonpool.vllm")


def scheduler(vllm_config: Any, kv_cache_config: Any) -> Scheduler:
    """The scheduler's side of the engine that `vllm_config` describes. Raises `MoonpoolError`, `ValueError`."""
    transfer = vllm_config.kv_transfer_config
    settings = _settings(vllm_config)
    _check(vllm_config)
    compat.fix_hash_root()
    compat.recompute_on_failure(transfer)
    groups = _groups(kv_cache_config)
    parallel = compat.parallel(vllm_config)
    plan = engine_plan(vllm_config, kv_cache_config, groups, settings, len(parallel.ranks))
    base = identity.engine_space(vllm_config, plan.tokens_per_object, tenant=settings.tenant)
    spaces = Spaces(base, groups, parallel, identity.lora_dtype(vllm_config))
    pool = _pool(settings, f"vllm scheduler {os.getpid()}", prefault=False)
    return Scheduler(
        settings,
        plan,
        spaces,
        pool,
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        shadow_rate=_shadow_rate(vllm_config, settings),
        event_format=event_format(kv_cache_config, plan.tokens_per_object) if settings.events else None,
    )


def worker(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> Worker:
    """This process's side of a worker whose KV cache lies in `kv_caches`. Raises `MoonpoolError`, `ValueError`."""
    settings = _settings(vllm_config)
    _check(vllm_config)
    groups = _groups(kv_cache_config)
    parallel = compat.parallel(vllm_config)
    plan = engine_plan(vllm_config, kv_cache_config, groups, settings, len(parallel.ranks))
    lies = geometry(
        groups,
        kv_caches,
        int(kv_cache_config.num_blocks),
        plan.tokens_per_object,
        lambda layer: compat.attention_backend(vllm_config, layer),
    )
    rank = compat.own_rank()
    base = identity.engine_space(vllm_config, plan.tokens_per_object, tenant=settings.tenant)
    spaces = RankSpaces(parallel, identity.rank_report(rank, base, lies))
    first = next(iter(kv_caches.values()))
    device = (first[0] if isinstance(first, list | tuple) else first).device
    pool = _pool(settings, f"vllm worker {os.getpid()}", prefault=device.type == "cpu")
    place = parallel.ranks.index(rank)
    comparer = _comparer(vllm_config, settings, lies.regions, kv_caches, device, pool)
    made = Worker(
        settings, place, lies.regions, spaces, pool, lambda a: _mover(a, lies.regions, device, settings), comparer
    )
    made.attach()
    return made


def engine_plan(
    vllm_config: Any, kv_cache_config: Any, groups: tuple[KvGroup, ...], settings: Settings, ranks: int
) -> Plan:
    """What an object is in this engine."""
    hash_tokens = compat.hash_tokens(vllm_config, kv_cache_config)
    tokens = compat.object_tokens(groups, hash_tokens, settings.tokens_per_object)
    return Plan(tokens, hash_tokens, tuple(_group_plan(group, tokens) for group in groups), ranks)


def _groups(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    groups = compat.kv_groups(kv_cache_config)
    if len(groups) > 1 and not compat.failures_by_request():
        raise Unsupported(f"{len(groups)} KV groups need vLLM 0.32: before, it can't be told which load has failed")
    return groups


def _group_plan(group: KvGroup, tokens: int) -> GroupPlan:
    if group.kind is Kind.STATE:
        raise Unsupported("state-space layers aren't supported yet")
    if group.kind is Kind.WINDOW:
        return GroupPlan(group.index, group.block_tokens, tokens, "window", window_objects(group.window_tokens, tokens))
    return GroupPlan(group.index, group.block_tokens, tokens)


def _settings(vllm_config: Any) -> Settings:
    return parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config or {})


def _check(vllm_config: Any) -> None:
    reason = compat.check(compat.version()) or compat.refusal(vllm_config)
    if reason:
        raise Unsupported(reason)


def _shadow_rate(vllm_config: Any, settings: Settings) -> float:
    """The setting, or 0 where this engine's KV can't be compared."""
    why = unsupported(str(vllm_config.cache_config.cache_dtype)) if settings.shadow_rate else None
    if why is not None:
        log.error(why)
    return settings.shadow_rate if why is None else 0.0


def _pool(settings: Settings, name: str, *, prefault: bool) -> Pool:
    return Pool(settings.url, name, failures_max=settings.failures_max, retry_s=settings.retry_s, prefault=prefault)


def _comparer(
    vllm_config: Any,
    settings: Settings,
    regions: tuple[Region, ...],
    kv_caches: dict[str, Any],
    device: Any,
    pool: Pool,
) -> Callable[[Callable[[WorkerReport], None]], Comparer] | None:
    """What makes a worker's comparer; None where nothing is compared."""
    if not settings.shadow_rate:
        return None
    try:
        found = kinds(regions, kv_caches, str(vllm_config.cache_config.cache_dtype))
    except Unsupported as error:
        log.error("shadow mode is off: %s", error)
        return None
    return lambda tell: Comparer(regions, found, device, settings.shadow_tolerance, pool, tell)


def _mover(attachment: Attachment, regions: tuple[Region, ...], device: Any, settings: Settings) -> Mover:
    if device.type == "cpu":
        from moonpool.gpu.host import HostMover

        return HostMover(attachment.pool.bytes, regions)
    if device.type != "cuda":
        raise Unsupported(f"KV cache on a device of type {device.type!r} isn't supported")
    from moonpool.gpu.pool import PoolMover

    return PoolMover(attachment, regions, device, staging_bytes=settings.staging_bytes)
