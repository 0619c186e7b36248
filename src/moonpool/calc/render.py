"""A report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.calc.report import Report
from moonpool.sizes import format_bytes, format_duration


def render(report: Report) -> Group:
    """Return `report` as tables that a rich console prints."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    yield Text(f"{report.model_type}: {'; '.join(report.layers)}; KV as {report.kv_dtype}")
    yield _sizes(report)
    yield _moves(report)
    yield _objects(report)
    yield Text(f"Recommended: {report.recommended_tokens_per_object} tokens an object: {report.recommendation}.")
    if report.pool_bytes is not None:
        yield Text(
            f"The node's pool, {_both(report.pool_bytes)}, holds {report.pool_tokens:,} tokens of requests that share "
            "nothing."
        )
    if report.compute_s is None:
        yield Text("Give --prefill-rate (tokens a second) to see what computing takes beside moving.")
    for note in report.notes:
        yield Text(f"Note: {note}.")


def _sizes(report: Report) -> Table:
    table = Table(title="KV cache", title_justify="left")
    table.add_column("of")
    table.add_column("whole model", justify="right")
    if report.tp_size > 1:
        table.add_column(f"each of {report.tp_size} ranks", justify="right")
    rows = [
        ("a token", report.token_bytes, report.rank_token_bytes),
        (f"a block of {report.tokens_per_block:,}", report.block_bytes, report.rank_block_bytes),
    ]
    if report.state_bytes:
        rows.append(("a request's state", report.state_bytes, report.rank_state_bytes))
    rows.append((f"a request of {report.tokens:,}", report.request_bytes, report.rank_request_bytes))
    for noun, whole, rank in rows:
        table.add_row(noun, _both(whole), *([_both(rank)] if report.tp_size > 1 else []))
    if report.kv_copies > 1:
        table.caption = f"{report.kv_copies} ranks hold the same KV; it is stored once"
    return table


def _moves(report: Report) -> Table:
    table = Table(title=f"Moving a request of {report.tokens:,} tokens", title_justify="left")
    table.add_column("over")
    for heading in ("GB/s", "takes", "beats prefill below"):
        table.add_column(heading, justify="right")
    if report.compute_s is not None:
        table.add_column("computing takes", justify="right")
        table.add_column("times faster", justify="right")
    table.add_column("source")
    for move in report.moves:
        cells = [
            move.name,
            f"{move.bytes_per_s / 1e9:.1f}",
            format_duration(move.seconds),
            f"{move.break_even_tokens_per_s:,.0f} tokens/s",
        ]
        if report.compute_s is not None and move.times_faster is not None:
            cells += [format_duration(report.compute_s), f"{move.times_faster:.1f}"]
        table.add_row(*cells, move.source)
    if report.break_even_bytes_per_s is not None:
        table.caption = f"moving beats computing from {format_bytes(report.break_even_bytes_per_s)}/s a rank on"
    return table


def _objects(report: Report) -> Table:
    table = Table(title="Tokens an object", title_justify="left")
    for heading in ("tokens", "bytes", "objects", "their own cost", "share", "tokens lost"):
        table.add_column(heading, justify="right")
    if report.compute_s is not None:
        table.add_column("computed again in", justify="right")
    for size in report.objects:
        cells = [
            f"{size.tokens:,}",
            format_bytes(size.bytes),
            f"{size.objects:,}",
            format_duration(size.overhead_s),
            f"{size.overhead_share:.0%}",
            f"{size.lost_tokens:g}",
        ]
        if size.lost_s is not None:
            cells.append(format_duration(size.lost_s))
        chosen = size.tokens == report.recommended_tokens_per_object
        table.add_row(*cells, style="bold" if chosen else None)
    return table


def _both(count: int) -> str:
    """Return a size in binary units, as memory is counted, and in decimal ones, as wires are."""
    binary, decimal = format_bytes(count, binary=True), format_bytes(count)
    return binary if binary == decimal else f"{binary} ({decimal})"
