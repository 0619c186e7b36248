"""The demo's result for people: three tables and what they mean."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moonpool.demo.run import IN_PROCESS, MOONPOOL, RECOMPUTE, Result
from moonpool.demo.tamper import CONTROLS

_ROWS = (
    ("recompute (no store)", RECOMPUTE),
    ("in-process DRAM (embedded:)", IN_PROCESS),
    ("Moonpool (a fresh process a run)", MOONPOOL),
)


def show(result: Result, console: Console) -> None:
    """Print `result` to `console`."""
    settings = result.settings
    console.print(
        f"{result.prompts} prompts of {result.prompt_tokens // result.prompts:,} tokens on average, "
        f"{settings.tokens_per_object} tokens an object;\n"
        f"a Llama of {settings.layers} layers of {settings.hidden} in {settings.dtype}, on the CPU\n"
    )
    console.print(_times(result))
    console.print("The first run stores, and shares prefixes among the prompts; the second loads.\n")
    console.print(_stages(result))
    console.print()
    console.print(_controls(result))
    console.print(
        "Logits and KV cache: how far off, in tolerances. Two whole blocks swapped change\n"
        "no output of that prompt (cached keys carry their positions, and attention sums\n"
        "over a set); the KV cache itself shows them.\n"
    )
    verdict = result.verdicts[MOONPOOL[1]]
    ties = f"; {verdict.ties} prompts part at a tie" if verdict.ties else ""
    if verdict.same:
        console.print(
            f"The same: all {verdict.tokens_compared} generated tokens{ties};\n"
            f"logits and KV cache within {result.tolerance:g} of the largest, the tolerance for {settings.dtype}."
        )


def _times(result: Result) -> Table:
    table = Table(title="Seconds until every prompt has its first token", title_justify="left")
    table.add_column("")
    for name in ("first run", "second run", "ratio"):
        table.add_column(name, justify="right")
    base = result.stages[RECOMPUTE[1]].seconds
    for label, (first, second) in _ROWS:
        again = result.stages[second].seconds
        table.add_row(
            label, f"{result.stages[first].seconds:.3f} s", f"{again:.3f} s", f"{base / again:.1f} x"
        )
    return table


def _stages(result: Result) -> Table:
    table = Table(title="Where the time went: ms, and GB/s into the store and out", title_justify="left")
    table.add_column("")
    for name in ("query", "load", "compute", "store", "tokens loaded", "in", "out"):
        table.add_column(name, justify="right")
    for _, runs in _ROWS[1:]:
        for name in runs:
            stages = result.stages[name]
            seconds = (stages.query_s, stages.load_s, stages.compute_s, stages.store_s)
            table.add_row(
                name,
                *(f"{value * 1e3:.1f}" for value in seconds),
                f"{stages.loaded:,}/{stages.tokens:,}",
                _speed(stages.bytes_stored, stages.store_s),
                _speed(stages.bytes_loaded, stages.load_s),
            )
    return table


def _speed(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.1f}" if count else ""


def _controls(result: Result) -> Table:
    table = Table(title="Negative controls: a wrong block has to show", title_justify="left")
    for name in ("", "tokens off", "logits", "KV cache", ""):
        table.add_column(name, justify="right" if name else "left")
    for name in (MOONPOOL[1], *CONTROLS):
        verdict = result.verdicts[name]
        found = "the same" if verdict.same else "noticed"
        table.add_row(
            name,
            f"{verdict.tokens_differing} of {verdict.tokens_compared}",
            f"{verdict.logits_off:.2g}",
            f"{verdict.kv_off:.2g}",
            found if name not in CONTROLS or not verdict.same else "NOT NOTICED",
        )
    return table
