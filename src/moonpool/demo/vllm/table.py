"""The result for people: what each engine did, and whether wrong blocks show."""

from __future__ import annotations

from statistics import mean

from rich.console import Console
from rich.table import Table

from moonpool.demo.vllm.run import Result
from moonpool.demo.vllm.settings import ENGINES, SECOND
from moonpool.demo.vllm.tamper import CONTROLS


def show(result: Result, console: Console) -> None:
    """Print `result` to `console`."""
    settings = result.settings
    console.print(
        f"{result.prompts} prompts of {result.prompt_tokens // result.prompts:,} tokens on average, all at once;\n"
        f"a Llama of {settings.layers} layers of {settings.hidden} in {settings.dtype}, on the CPU;\n"
        "each engine is a fresh process, with vLLM's own prefix caching on\n"
    )
    console.print(_engines(result))
    console.print(
        "Computed, shared, loaded: where the KV cache of the prompts' tokens came from:\n"
        "the engine's own work, its own prefix cache, the pool. B answers what A has\n"
        "answered, and another question about each document.\n"
    )
    console.print(_controls(result))
    verdict = result.verdicts[SECOND]
    if verdict.same:
        console.print(
            f"\nThe same: all {verdict.tokens_compared} generated tokens, and logprobs within {result.tolerance:g}.\n"
            f"B's first tokens came {result.ratio:.1f} times sooner than without the pool."
        )


def _engines(result: Result) -> Table:
    table = Table(title="vLLM engines: mean time to first token, and where tokens came from", title_justify="left")
    table.add_column("")
    for name in ("prompts", "TTFT", "tokens/s", "computed", "shared", "loaded"):
        table.add_column(name, justify="right")
    for name in ENGINES:
        found = result.answers[name]
        tokens = found.computed + found.shared + found.loaded
        table.add_row(
            name,
            str(len(found.tokens)),
            f"{mean(found.first_token_s):.3f} s",
            f"{tokens / found.seconds:,.0f}",
            *(f"{count:,}" for count in (found.computed, found.shared, found.loaded)),
        )
    return table


def _controls(result: Result) -> Table:
    table = Table(title="Negative controls: wrong bytes in the pool have to show", title_justify="left")
    for name in ("", "tokens off", "logprobs off", ""):
        table.add_column(name, justify="right" if name else "left")
    for name in (SECOND, *CONTROLS):
        verdict = result.verdicts[name]
        found = "the same" if verdict.same else "noticed"
        table.add_row(
            name,
            f"{verdict.tokens_differing} of {verdict.tokens_compared}",
            f"{verdict.logprobs_off:.2g}" if verdict.logprobs_off else "",  # tokens may part at the first one
            found if name not in CONTROLS or not verdict.same else "NOT NOTICED",
        )
    return table
