"""vLLM on the pool: `MoonpoolConnector`, a KV connector. Needs vLLM; see docs/engines/vllm.md."""

from __future__ import annotations

from typing import Any

__all__ = ["MoonpoolConnector"]


def __getattr__(name: str) -> Any:
    # Loaded when vLLM asks for it: the rest of this package can be had without vLLM.
    if name == "MoonpoolConnector":
        from moonpool.engines.vllm.connector import MoonpoolConnector

        return MoonpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
