"""A prefix cache around one model: load the longest stored prefix, compute the rest, store what was new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moonpool.engines.transformers.identity import key_space, state_mark
from moonpool.engines.transformers.layout import BlockLayout
from moonpool.engines.transformers.report import Report
from moonpool.engines.transformers.support import (
    CACHE_ARGUMENT,
    device_of,
    empty_cache,
    fill,
    layers_of,
    probe_layout,
    rows_generated,
    token_row,
)
from moonpool.errors import InvalidRequest, MoonpoolError
from moonpool.keys import KeySpace, block_digests
from moonpool.status import Status

if TYPE_CHECKING:
    from moonpool.client.client import Client

log = logging.getLogger(__name__)


class Prefill(NamedTuple):
    """The state in which `prefill` leaves a prompt."""

    past_key_values: Any
    """A `DynamicCache` that holds the whole prompt; the caller's own."""
    logits: Any
    """The logits of the prompt's last token, `[1, vocabulary]`."""


class PrefixCache:
    """Keeps the KV cache of a Hugging Face causal LM in the store, in objects of `tokens_per_object` tokens.

    `model` is a decoder-only model with full attention in every layer, in eval mode, on one device; `client` is
    what `moonpool.connect` returns, and stays the caller's to close. Objects are found by the model's weights,
    configuration, adapter, dtype, layout, `tenant` and the tokens themselves, so that any process with the same
    model shares them and no other does. Weights that change are noticed, and found under other keys from then on.

    Never raises because of the store: what can't be loaded is computed, what can't be stored isn't, `failures` counts
    it, `last.trouble` says why, and the log says it once. One call at a time; a client may serve many caches.
    Raises `UnsupportedModel` for a model whose cache can't be cut into blocks of tokens.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        tokens_per_object: int = 64,
        tenant: str = "",
        model_name: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if tokens_per_object < 1:
            raise InvalidRequest(
                f"tokens_per_object is {tokens_per_object}: an object holds at least one token"
            )
        self.model = model
        self.client = client
        self.failures = 0
        """Loads and stores that the store didn't serve, since the beginning."""
        self.last: Report | None = None
        """What the latest call did."""
        self._tenant, self._model_name, self._clock = tenant, model_name, clock
        self._device = device_of(model)
        self.layout: BlockLayout = probe_layout(model, tokens_per_object)
        """Shape and dtype of the objects."""
        self._mark: tuple[Any, ...] = ()
        self._warned = False
        self._refresh_space()

    @property
    def space(self) -> KeySpace:
        """The key space of the model as it was at the latest call."""
        return self._space

    def keys(self, input_ids: Any) -> list[bytes]:
        """Return the keys of the objects that hold `input_ids`, one per `tokens_per_object` tokens. Changes nothing.

        A last piece that isn't full has none. Good for the client's own calls: `exists_many`, `pin_many`,
        `remove_many`.
        """
        self._refresh_space()
        return self._keys(token_row(input_ids, self._device))

    def prefill(self, input_ids: Any) -> Prefill:
        """Return the prompt's KV cache and the logits of its last token; store what was new.

        `input_ids` is one sequence: a list of ints or a tensor `[n]` or `[1, n]`. At least the last token is computed,
        whatever is stored.
        """
        row, report = self._begin(input_ids)
        cache = self._load(row, report)
        began = self._now()
        with torch.no_grad():
            output = self.model(
                input_ids=row[:, report.loaded :], use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}
            )
        report.compute_s = self._now() - began
        self._store(row, cache, report)
        self.last = report
        return Prefill(cache, output.logits[:, -1])

    def generate(self, input_ids: Any, **arguments: Any) -> Any:
        """Return what `model.generate(input_ids, **arguments)` returns; store the KV cache that was new.

        Greedy, sampling, beams and several sequences alike. What was generated is stored too where there is one
        sequence, so that a conversation's next turn finds it. Raises `InvalidRequest` for arguments under which
        the tokens don't decide the KV cache (padding, images, embeddings, a cache of the caller's), and for
        assisted decoding, which can't go on from a prefix.
        """
        row, report = self._begin(input_ids)
        rows = rows_generated(self.model, arguments)
        cache = self._load(row, report)
        began = self._now()
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        # Given, because `generate` would otherwise take a padding token inside the prompt for padding.
        arguments.setdefault("attention_mask", torch.ones_like(row))
        output = self.model.generate(row, **{CACHE_ARGUMENT: cache}, **arguments)
        report.compute_s = self._now() - began
        tokens = output if isinstance(output, torch.Tensor) else output.sequences
        report.generated = int(tokens.shape[1]) - report.tokens
        # Beams and drawn sequences have the prompt in common, and nothing after it.
        self._store(row if rows > 1 else tokens, cache, report)
        self.last = report
        return output

    def _begin(self, input_ids: Any) -> tuple[Any, Report]:
        if self.model.training:
            raise InvalidRequest(
                "the model is in training mode, where dropout changes its KV cache: call model.eval()"
            )
        row = token_row(input_ids, self._device)
        self._refresh_space()
        return row, Report(tokens=int(row.shape[1]))

    def _load(self, row: Any, report: Report) -> Any:
        """Return a cache that holds the longest stored prefix of `row`, short of its last token; an empty one if none.

        Between the look-up and the view an object may go: the prefix is then the shorter for it.
        """
        cache = empty_cache(self.model)
        began = queried = self._now()
        try:
            keys = self._keys(row[:, :-1])
            found = self.client.prefix_length(keys) if keys else 0
            queried = self._now()
            if found:
                blocks = self._load_blocks(keys[:found], cache)
                report.loaded = blocks * self.layout.tokens
                report.bytes_loaded = blocks * self.layout.object_bytes
        except (MoonpoolError, OSError) as error:
            self._failed("load", error, report)
            cache = empty_cache(self.model)
        finally:
            report.query_s = queried - began
            report.load_s = self._now() - queried
        return cache

    def _load_blocks(self, keys: list[bytes], cache: Any) -> int:
        """Copy the leading objects of `keys` that are there into `cache`; return how many. Keeps no view."""
        with self.client.view_many(keys) as views:
            whole = []
            for view in views:
                if view is None or view.nbytes != self.layout.object_bytes:
                    break
                whole.append(view)
            if whole:
                fill(cache, self.layout.read(whole, self._device))
            return len(whole)

    def _store(self, tokens: Any, cache: Any, report: Report) -> None:
        """Put the full blocks of `tokens` that `cache` holds and that weren't loaded into the store."""
        began = self._now()
        try:
            if not report.trouble:
                self._store_blocks(tokens, cache, report)
        except (MoonpoolError, OSError) as error:
            self._failed("store", error, report)
        finally:
            report.store_s = self._now() - began

    def _store_blocks(self, tokens: Any, cache: Any, report: Report) -> None:
        layout, layers = self.layout, layers_of(cache)
        if not layout.fits(layers):
            shapes = ", ".join(
                sorted({f"{part.dtype} {list(part.shape)}" for pair in layers for part in pair})
            )
            raise MoonpoolError(
                f"the KV cache ({shapes}) isn't as it was when PrefixCache was made: make a new one"
            )
        first = report.loaded // layout.tokens
        # The last token generated has no KV cache yet, so the cache is what counts.
        keys = self._keys(tokens[:, : cache.get_seq_length()])[first:]
        if not keys:
            return
        # Each time, because the node may be another one by now; one round trip beside those that store.
        self.client.declare(self._space)
        with self.client.reserve_many(keys, [layout.object_bytes] * len(keys)) as reservations:
            for index, reservation in enumerate(reservations, start=first):
                if reservation.buffer is not None:
                    layout.write(layers, index * layout.tokens, reservation.buffer)
        statuses = [reservation.status for reservation in reservations]
        objects = statuses.count(Status.OK)
        report.stored, report.bytes_stored = objects * layout.tokens, objects * layout.object_bytes
        refused = [status for status in statuses if not status.stored and status is not Status.IN_PROGRESS]
        if refused:
            names = ", ".join(sorted({status.name for status in refused}))
            raise MoonpoolError(f"{len(refused)} of {len(keys)} objects weren't stored: {names}")

    def _keys(self, row: Any) -> list[bytes]:
        return self._space.keys(block_digests(row[0].cpu().numpy(), self.layout.tokens))

    def _refresh_space(self) -> None:
        mark = state_mark(self.model)
        if mark != self._mark:
            self._space = key_space(self.model, self.layout, tenant=self._tenant, model_name=self._model_name)
            self._mark = mark

    def _failed(self, stage: str, error: Exception, report: Report) -> None:
        self.failures += 1
        report.trouble = f"{stage}: {type(error).__name__}: {error}"
        if not self._warned:
            self._warned = True
            log.warning(
                "Moonpool couldn't %s KV cache (%s: %s). Generation goes on without it; further failures are counted "
                "in PrefixCache.failures and not logged.", stage, type(error).__name__, error,
            )  # fmt: skip

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()
